// Run, with ranks as processes: one rank of a program with a loop of its own fails. The timeouts
// are an hour and half an hour, so a rank that waits for the failed one hangs.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/cores.h"
#include "base/file.h"
#include "base/loopback_testing.h"
#include "base/runfiles.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace ddp::session {
namespace {

struct Outcome {
  int code = 0;
  std::vector<std::string> errors;  // without the launcher's own lines about exit codes
  std::string output;
};

Outcome RunProgram(const std::string& mode, int rank) {
  const std::string path = absl::StrCat(testing::TempDir(), "/", mode, rank, ".txt");
  const std::string command = absl::StrCat(*Runfile("libtorch_ddp/ddp/session/run_test_main"), " ",
                                           mode, " ", rank, " > ", path, " 2>&1");
  const int status = std::system(command.c_str());
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.output = *ReadFile(path);
  for (absl::string_view line : absl::StrSplit(outcome.output, '\n')) {
    if (absl::StrContains(line, "exited with code")) continue;
    if (absl::StrContains(line, "error: ")) outcome.errors.push_back(std::string(line));
  }
  return outcome;
}

TEST(RunTest, TheErrorOfOneRankIsTheJobsOnlyMessage) {
  for (const auto& [mode, message] : std::vector<std::pair<std::string, std::string>>{
           {"collective", "no file"}, {"agree", "no file"}, {"throw", "the disk is on fire"}}) {
    for (int rank = 0; rank < 3; ++rank) {
      const Outcome outcome = RunProgram(mode, rank);
      EXPECT_EQ(outcome.code, 1) << outcome.output;
      EXPECT_EQ(outcome.errors,
                std::vector<std::string>{absl::StrCat("error: rank ", rank, ": ", message)})
          << mode << "\n"
          << outcome.output;
    }
  }
}

TEST(RunTest, ANotedStopIsTheEndOfABodyWithoutAnError) {
  const Outcome stopped = RunProgram("stop", 0);
  EXPECT_EQ(stopped.code, 138) << stopped.output;
  int lines = 0;
  for (absl::string_view line : absl::StrSplit(stopped.output, '\n')) {
    lines += absl::EndsWith(line, "stopped by signal USR1") && !absl::StrContains(line, "error: ");
  }
  EXPECT_EQ(lines, 1) << stopped.output;  // by rank 0

  const Outcome failed = RunProgram("stop_and_fail", 1);
  EXPECT_EQ(failed.code, 1) << failed.output;
  EXPECT_EQ(failed.errors, std::vector<std::string>{"error: rank 1: no file"}) << failed.output;
}

// Whichever rank's process ends first.
TEST(RunTest, TheExitCodeThatTheErrorAsksForIsTheJobs) {
  for (const std::string mode : {"code", "code_in_agree"}) {
    for (int rank = 0; rank < 3; ++rank) {
      const Outcome outcome = RunProgram(mode, rank);
      EXPECT_EQ(outcome.code, 70) << outcome.output;
      EXPECT_EQ(outcome.errors,
                std::vector<std::string>{absl::StrCat("error: rank ", rank, ": no file")})
          << mode << "\n"
          << outcome.output;
    }
  }
}

// The others notice that it is gone, and could end before the launcher looks.
TEST(RunTest, ARankThatEndsWithoutAWordIsTheFirst) {
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome outcome = RunProgram("vanish", rank);
    EXPECT_EQ(outcome.code, 77) << outcome.output;
    EXPECT_TRUE(absl::StrContains(outcome.output, absl::StrCat("error: rank ", rank, " (pid ")))
        << outcome.output;
  }
}

// The others neither communicate nor end.
TEST(RunTest, AFailedRankDoesNotWaitForRanksThatWorkAlone) {
  const Outcome outcome = RunProgram("alone", 1);
  EXPECT_EQ(outcome.code, 1) << outcome.output;
  ASSERT_EQ(outcome.errors.size(), 1) << outcome.output;
  EXPECT_TRUE(absl::EndsWith(outcome.errors[0], "error: rank 1: no file")) << outcome.output;
}

TEST(RunTest, AThreadThatCannotStartIsExplainedByItsLimits) {
  const Outcome outcome = RunProgram("thread", 1);
  EXPECT_EQ(outcome.code, 1) << outcome.output;
  ASSERT_EQ(outcome.errors.size(), 1) << outcome.output;
  EXPECT_TRUE(absl::StartsWith(outcome.errors[0],
                               "error: rank 1: Resource temporarily unavailable: the system lets "
                               "this process start no more threads; limits: "))
      << outcome.output;
}

// By the program's own words, and with the exit code of a wrong option, whoever prints it.
TEST(RunTest, AnOptionIsExplainedByTheProgram) {
  for (int rank : {0, 2}) {
    const Outcome outcome = RunProgram("option", rank);
    EXPECT_EQ(outcome.code, 2) << outcome.output;
    ASSERT_EQ(outcome.errors.size(), 1) << outcome.output;
    EXPECT_TRUE(absl::EndsWith(outcome.errors[0], "error: --optimizer.lr is wrong"))
        << outcome.output;
  }
}

// The ranks are started alike here, and take their options from RANK. Without the comparison, those
// of each of these modes would end with 0.
TEST(RunTest, RanksWithDifferentOptionsEndWithOneMessage) {
  for (const auto& [mode, message] : std::vector<std::pair<std::string, std::string>>{
           {"options",
            "rank 0: --lr=0.1 is not the same on all ranks: ranks 0, 2 have 0.1, rank 1 has 0.2; "
            "ranks also differ in group.backend, group.stall_s"},
           {"folder",
            "rank 0: --folder= must be set on all ranks or on none: ranks 0, 2 have none, rank 1 "
            "has b"},
           {"own_options",
            "rank 0: group.stall_s=30 is not the same on all ranks: ranks 0, 2 have 30, rank 1 has "
            "99"}}) {
    const Outcome outcome = RunProgram(mode, 1);
    EXPECT_EQ(outcome.code, 2) << mode << "\n" << outcome.output;
    EXPECT_EQ(outcome.errors, std::vector<std::string>{absl::StrCat("error: ", message)})
        << mode << "\n"
        << outcome.output;
  }
}

// One rank waits in a Coordinator call for the others, which wait for it in a collective; or it has
// ended.
TEST(RunTest, RanksThatWaitForEachOtherEndWithOneMessage) {
  for (const std::string mode : {"saves_alone", "ends_early", "backward"}) {
    for (int rank : {0, 1}) {
      const Outcome outcome = RunProgram(mode, rank);
      EXPECT_EQ(outcome.code, 1) << outcome.output;
      ASSERT_EQ(outcome.errors.size(), 1) << mode << "\n" << outcome.output;
      const std::string& error = outcome.errors[0];
      EXPECT_TRUE(absl::StartsWith(error, absl::StrCat("error: rank ", 1 - rank, ": "))) << error;
      EXPECT_TRUE(absl::StrContains(error, "failed: the ranks wait for each other: rank")) << error;
      EXPECT_TRUE(absl::StrContains(
          error,
          absl::StrCat(", which rank ", rank,
                       mode == "ends_early" ? " has not called and will not: its work has ended"
                                            : " has not called; ")))
          << error;
    }
  }
}

TEST(RunTest, ARankHasTheThreadsThatSlurmWasAskedFor) {
  if (AvailableCores() < 2) GTEST_SKIP() << "there is one core only";
  const auto expect_threads = [](int threads) {
    const std::string output = RunProgram("threads", 0).output;
    EXPECT_TRUE(absl::StrContains(output, absl::StrCat("computes with ", threads, " threads\n")))
        << output;
  };
  unsetenv("OMP_NUM_THREADS");
  expect_threads(AvailableCores());
  setenv("SLURM_CPUS_PER_TASK", "1", 1);
  expect_threads(1);
  // What the user says counts for more.
  setenv("OMP_NUM_THREADS", "2", 1);
  expect_threads(2);
  unsetenv("SLURM_CPUS_PER_TASK");
}

// As PyTorch's env:// is used by hand.
TEST(RunTest, RanksThatAreNotToldHowManyAreHereCountThemselves) {
  unsetenv("OMP_NUM_THREADS");
  const LoopbackListener listener = ListenOnLoopback();
  const UniqueFd inherited(dup(listener.fd.get()));  // stays open across exec
  const std::string path = absl::StrCat(testing::TempDir(), "/local_size.txt");
  std::string command = "(";
  for (const int rank : {0, 1}) {
    absl::StrAppend(&command, "RANK=", rank, " WORLD_SIZE=2 LOCAL_RANK=", rank,
                    " MASTER_ADDR=127.0.0.1 MASTER_PORT=", listener.port, " ");
    if (rank == 0) absl::StrAppend(&command, "DDP_MASTER_LISTEN_FD=", inherited.get(), " ");
    absl::StrAppend(&command, *Runfile("libtorch_ddp/ddp/session/run_test_main"),
                    " local_size 0 & ");
  }
  absl::StrAppend(&command, "wait) > ", path, " 2>&1");
  EXPECT_EQ(std::system(command.c_str()), 0);
  const std::string output = *ReadFile(path);
  const bool bound = BoundCores() < static_cast<int>(std::thread::hardware_concurrency());
  const int threads = std::max(1, bound ? AvailableCores() : AvailableCores() / 2);
  const std::string line = absl::StrCat("2 ranks here, ", threads, " threads\n");
  const size_t first = output.find(line);
  ASSERT_NE(first, std::string::npos) << output;
  EXPECT_NE(output.find(line, first + 1), std::string::npos) << output;
}

TEST(RunTest, AVariableOfTheLauncherIsTheUsers) {
  setenv("PET_NNODES", "x", 1);
  const Outcome outcome = RunProgram("agree", 0);
  unsetenv("PET_NNODES");
  EXPECT_EQ(outcome.code, 2) << outcome.output;
  EXPECT_EQ(outcome.errors, std::vector<std::string>{"error: PET_NNODES=x is no number of nodes"});
}

// As mpirun sets them on several nodes, without MASTER_ADDR.
TEST(RunTest, AMissingVariableOfTheLauncherIsTheUsers) {
  const std::pair<const char*, const char*> variables[] = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                           {"OMPI_COMM_WORLD_SIZE", "2"},
                                                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
  for (const auto& [name, value] : variables) setenv(name, value, 1);
  const Outcome outcome = RunProgram("local_size", 0);
  for (const auto& [name, value] : variables) unsetenv(name);
  EXPECT_EQ(outcome.code, 2) << outcome.output;
  ASSERT_EQ(outcome.errors.size(), 1u) << outcome.output;
  EXPECT_TRUE(absl::StrContains(outcome.errors[0], "does not say where rank 0 is"))
      << outcome.output;
}

TEST(RunTest, OptionsOfARankMayDiffer) {
  const Outcome outcome = RunProgram("may_differ", 1);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

}  // namespace
}  // namespace ddp::session
