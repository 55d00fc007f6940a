// The guard with ranks as processes, under a launcher that restarts ranks that fail.

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

constexpr char kFound[] = "rank 1: step 7: the loss is nan; examples ";

class GuardProcessTest : public testing::TestWithParam<std::string> {
 protected:
  // Returns the exit code.
  int Run(const std::string& on_anomaly) {
    folder_ = absl::StrCat(testing::TempDir(), "/guard_", GetParam(), "_", on_anomaly);
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    const std::string command =
        absl::StrCat(*Runfile("libtorch_ddp/ddp/trainer/guard/guard_test_main"), " ", GetParam(),
                     " ", on_anomaly, " ", folder_, " > ", folder_, "/output.txt 2>&1");
    const int status = std::system(command.c_str());
    output_ = ReadFile(folder_ + "/output.txt").value();
    EXPECT_TRUE(WIFEXITED(status)) << output_;
    return WEXITSTATUS(status);
  }
  int LinesWith(absl::string_view text) const {
    int lines = 0;
    for (const absl::string_view line : absl::StrSplit(output_, '\n')) {
      lines += absl::StrContains(line, text);
    }
    return lines;
  }
  std::string BytesOf(int rank) const {
    return ReadFile(absl::StrCat(folder_, "/rank_", rank)).value();
  }
  bool Exists(const std::string& file) const {
    return std::filesystem::exists(absl::StrCat(folder_, "/", file));
  }

  std::string folder_;
  std::string output_;
};

INSTANTIATE_TEST_SUITE_P(Backends, GuardProcessTest, testing::Values("gloo", "shm"));

TEST_P(GuardProcessTest, AStopIsOneMessageAndIsNotRestarted) {
  EXPECT_EQ(Run("stop"), kAnomalyExitCode) << output_;
  EXPECT_EQ(LinesWith(absl::StrCat("error: ", kFound)), 1) << output_;
  // Beside it there is the launcher's.
  EXPECT_EQ(LinesWith("error: "), 1 + LinesWith("exited with code 65")) << output_;
  EXPECT_EQ(LinesWith("restart 1 of"), 0) << output_;
  EXPECT_TRUE(Exists("checkpoints/epoch_0_step_5.pt")) << output_;
  EXPECT_FALSE(Exists("rank_0") || Exists("rank_1")) << output_;
  EXPECT_TRUE(absl::StrContains(ReadFile(folder_ + "/logs/metrics.jsonl").value(),
                                "\"event\":\"run_end\",\"reason\":\"anomaly\""));
}

TEST_P(GuardProcessTest, ARunGoesOnWithTheSameParametersOnAllRanks) {
  std::vector<std::string> bytes;
  for (const std::string policy : {"skip", "rollback"}) {
    EXPECT_EQ(Run(policy), 0) << output_;
    EXPECT_EQ(LinesWith(kFound), 1) << output_;
    EXPECT_EQ(LinesWith("error: "), 0) << output_;
    EXPECT_EQ(LinesWith("epoch_0_step_5.pt"), policy == "rollback") << output_;
    EXPECT_EQ(BytesOf(0), BytesOf(1));
    bytes.push_back(BytesOf(0));
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

}  // namespace
}  // namespace ddp::trainer
