// Like failure_test.cc, but with ranks as processes under the local launcher.

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

class FailureProcessTest : public testing::TestWithParam<std::string> {
 protected:
  // The lines that report an error, without the launcher's own about exit codes.
  std::vector<std::string> Errors(const std::string& what, int rank) {
    const std::string folder = absl::StrCat(testing::TempDir(), "/", GetParam(), "_", what, rank);
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    const std::string output = folder + "/output.txt";
    const std::string command =
        absl::StrCat(*Runfile("libtorch_ddp/ddp/trainer/failure_test_main"), " ", GetParam(), " ",
                     what, " ", rank, " ", folder, " > ", output, " 2>&1");
    const int status = std::system(command.c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) != 0) << command;
    all_ = *ReadFile(output);
    std::vector<std::string> errors;
    for (absl::string_view line : absl::StrSplit(all_, '\n')) {
      if (absl::StrContains(line, "exited with code")) continue;
      if (absl::StrContains(line, "error: ")) errors.push_back(std::string(line));
    }
    return errors;
  }

  std::string all_;
};

INSTANTIATE_TEST_SUITE_P(Backends, FailureProcessTest, testing::Values("gloo", "shm"));

TEST_P(FailureProcessTest, OneMessageFromTheRankWhoseDataFails) {
  for (int rank = 0; rank < 3; ++rank) {
    const auto errors = Errors("loader", rank);
    ASSERT_GE(errors.size(), 1) << all_;
    EXPECT_TRUE(absl::StartsWith(
        errors[0], absl::StrCat("error: rank ", rank, ": loading batch 3 of 10 (16 examples")))
        << all_;
    EXPECT_TRUE(absl::EndsWith(errors[0], "the disk is on fire")) << all_;
    EXPECT_EQ(errors.size(), 1) << all_;
  }
}

TEST_P(FailureProcessTest, OneMessageOfTheLogThatFails) {
  const auto errors = Errors("log", 0);
  ASSERT_GE(errors.size(), 1) << all_;
  EXPECT_TRUE(absl::StartsWith(errors[0], "error: rank 0: disk full")) << all_;
  EXPECT_EQ(errors.size(), 1) << all_;
}

// The other ranks do not wait for the dead rank.
TEST_P(FailureProcessTest, ARankThatIsKilledIsNamed) {
  for (int rank = 0; rank < 3; ++rank) {
    const auto errors = Errors("killed", rank);
    ASSERT_GE(errors.size(), 1) << all_;
    EXPECT_TRUE(absl::StrContains(all_, absl::StrCat("rank ", rank))) << all_;
  }
}

}  // namespace
}  // namespace ddp::trainer
