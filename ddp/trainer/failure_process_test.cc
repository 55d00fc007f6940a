// Like failure_test.cc, but with ranks as processes, most of them under the local launcher.

#include <fcntl.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/loopback_testing.h"
#include "base/process.h"
#include "base/runfiles.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "launchers/rank.h"
#include "launchers/variables.h"

namespace ddp::trainer {
namespace {

constexpr int kRanks = 3;

// The end of a process.
struct Ended {
  int status = 0;  // waitpid's
  std::string output;
};

class FailureProcessTest : public testing::TestWithParam<std::string> {
 protected:
  std::string NewFolder(const std::string& what, int rank) const {
    const std::string folder = absl::StrCat(testing::TempDir(), "/", GetParam(), "_", what, rank);
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    return folder;
  }
  // The command of failure_test_main for a failure of `rank`.
  std::vector<std::string> Command(const std::string& what, int rank,
                                   const std::string& folder) const {
    return {*Runfile("libtorch_ddp/ddp/trainer/failure_test_main"), GetParam(), what,
            absl::StrCat(rank), folder};
  }

  // Runs the ranks with torchrun's variables and without a launcher, which would end them all.
  // Waits until all have ended by themselves.
  std::vector<Ended> RunWithoutLauncher(const std::string& what, int rank) const {
    const std::string folder = NewFolder(what, rank);
    launchers::Rank place;
    place.world_size = place.local_world_size = kRanks;
    LoopbackListener listener = ListenOnLoopback();
    place.master_port = listener.port;
    std::vector<std::string> files;
    std::vector<pid_t> pids;
    for (int i = 0; i < kRanks; ++i) {
      place.rank = place.local_rank = i;
      place.master_listen_fd = i == 0 ? std::optional<int>(listener.fd.get()) : std::nullopt;
      files.push_back(absl::StrCat(folder, "/rank_", i, ".txt"));
      const UniqueFd file(open(files.back().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
      ProcessOptions options;
      options.argv = Command(what, rank, folder);
      options.argv.push_back("torchrun");
      options.environment = Environment::FromProcess().variables();
      for (const auto& [name, value] : launchers::VariablesFromRank(place)) {
        options.environment[name] = value;
      }
      options.stdout_fd = options.stderr_fd = file.get();
      if (place.master_listen_fd) options.inherited_fds = {*place.master_listen_fd};
      pids.push_back(StartProcess(options).value());
      listener.fd.Close();  // rank 0 alone holds it, so that it ends with rank 0
    }
    std::vector<Ended> ended(kRanks);
    for (int i = 0; i < kRanks; ++i) {
      EXPECT_EQ(waitpid(pids[i], &ended[i].status, 0), pids[i]);
      ended[i].output = ReadFile(files[i]).value_or("");
    }
    return ended;
  }

  // The lines that report an error, without the launcher's own about exit codes.
  std::vector<std::string> Errors(const std::string& what, int rank) {
    const std::string folder = NewFolder(what, rank);
    const std::string output = folder + "/output.txt";
    const std::string command =
        absl::StrCat(absl::StrJoin(Command(what, rank, folder), " "), " > ", output, " 2>&1");
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

  // Each survivor ends with a failure, and `least` to `most` of them name the killed rank.
  void ExpectKilledIsNamed(const std::string& what, int least, int most) {
    for (int killed = 0; killed < kRanks; ++killed) {
      SCOPED_TRACE(absl::StrCat("rank ", killed, " is killed"));
      const std::vector<Ended> ended = RunWithoutLauncher(what, killed);
      EXPECT_TRUE(WIFSIGNALED(ended[killed].status)) << ended[killed].output;
      // The store dies with rank 0: then a survivor cannot tell it from another that has ended
      // since.
      const std::regex named_dead(absl::StrCat("error: .*ranks? ([0-9]+, )*", killed,
                                               "[^0-9].*(has died|not answer",
                                               killed == 0 ? "|has ended" : "", ").*"));
      int named = 0;
      std::string output;
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == killed) continue;
        EXPECT_TRUE(WIFEXITED(ended[rank].status) && WEXITSTATUS(ended[rank].status) != 0)
            << ended[rank].output;
        absl::StrAppend(&output, "rank ", rank, ": ", ended[rank].output, "\n");
        for (const std::string& line :
             std::vector<std::string>(absl::StrSplit(ended[rank].output, '\n'))) {
          if (!std::regex_match(line, named_dead)) continue;
          ++named;
          break;
        }
      }
      EXPECT_GE(named, least) << output;
      if (killed != 0) {
        EXPECT_LE(named, most) << output;
      }
    }
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

// The other ranks do not wait for the dead rank: the timeout of collectives is an hour, and that of
// Coordinator calls is half an hour.
TEST_P(FailureProcessTest, ARankThatIsKilledIsNamed) { ExpectKilledIsNamed("killed", 2, 2); }

TEST_P(FailureProcessTest, ARankThatIsKilledWhileOthersAgreeIsNamedOnce) {
  ExpectKilledIsNamed("killed_in_agree", 1, 1);
}

// The one in the collective has the group aborted and ends first. If it serves the store, the other
// is told only of that.
TEST_P(FailureProcessTest, ARankThatIsKilledWhileOneAgreesAndOneCommunicatesIsNamed) {
  ExpectKilledIsNamed("killed_in_both", 1, 2);
}

// The threads that save do not wait for the dead rank either.
TEST_P(FailureProcessTest, ARankThatIsKilledByItsSavingThreadIsNamed) {
  ExpectKilledIsNamed("killed_in_save", 1, 2);
}

}  // namespace
}  // namespace ddp::trainer
