#include "launchers/slurm/requeue.h"

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"
#include "launchers/slurm/options.h"

namespace ddp::launchers::slurm {
namespace {

class RequeueTest : public testing::Test {
 protected:
  RequeueTest() { slurm().requeue = true; }

  SlurmOptions& slurm() { return options_.implementations.Mutable<SlurmOptions>("slurm"); }

  LaunchOptions options_ = {.name = "slurm"};
  RequeuedProgram program_ = {.folder_option = "checkpoint.dir",
                              .has_folder = true,
                              .saves_option = "checkpoint.every",
                              .saves = true,
                              .stop_signals = {"TERM", "USR2"}};
};

TEST_F(RequeueTest, AJobThatCanGoOn) {
  EXPECT_EQ(CheckRequeue(options_, program_), absl::OkStatus());
  slurm().requeue = false;
  EXPECT_EQ(CheckRequeue(options_, {}), absl::OkStatus());
  slurm().requeue = true;
  options_.name = "local";
  EXPECT_EQ(CheckRequeue(options_, {}), absl::OkStatus());
}

TEST_F(RequeueTest, WithoutCheckpointsEachLifeWouldBeginAnew) {
  program_.has_folder = false;
  EXPECT_EQ(CheckRequeue(options_, program_).message(),
            "slurm.requeue=true needs a folder with checkpoints to go on from: checkpoint.dir");
  program_.has_folder = true;
  program_.saves = false;
  EXPECT_EQ(CheckRequeue(options_, program_).message(),
            "slurm.requeue=true needs checkpoints to go on from, and the program saves none: "
            "checkpoint.every");
}

TEST_F(RequeueTest, TheSignalMustNotKillTheRanks) {
  slurm().signal = "USR1@120";
  EXPECT_EQ(CheckRequeue(options_, program_).message(),
            "slurm.signal=USR1@120 would kill the ranks before they save: USR1 is none of "
            "stop_signals=TERM,USR2");
}

}  // namespace
}  // namespace ddp::launchers::slurm
