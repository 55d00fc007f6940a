#include "launchers/threads.h"

#include <thread>

#include "base/cores.h"
#include "base/environment.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

class ThreadsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (all_ < 2) GTEST_SKIP() << "there is one core only";
  }

  const int all_ = AvailableCores();
};

TEST_F(ThreadsTest, ARankAloneHasAllCores) {
  EXPECT_EQ(CoresOfTask({}), all_);
  EXPECT_EQ(ThreadsOfRank({}, {}), all_);
}

TEST_F(ThreadsTest, RanksOfANodeShareItsCores) {
  if (BoundCores() < static_cast<int>(std::thread::hardware_concurrency())) {
    GTEST_SKIP() << "bound to some of the cores, as a rank is";
  }
  Rank rank;
  rank.world_size = rank.local_world_size = all_;
  EXPECT_EQ(ThreadsOfRank(rank, {}), 1);
  rank.world_size = rank.local_world_size = 2 * all_;
  EXPECT_EQ(ThreadsOfRank(rank, {}), 1);
}

TEST_F(ThreadsTest, ATaskOfSlurmHasTheCoresThatItWasAskedFor) {
  const Environment task{{"SLURM_CPUS_PER_TASK", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}};
  EXPECT_EQ(ThreadsOfRank({}, task), 1);
  EXPECT_EQ(CoresOfTask(task), 1);
  // What is asked for may be more than there is: with srun --overcommit, or in a container.
  EXPECT_EQ(ThreadsOfRank({}, {{"SLURM_CPUS_PER_TASK", "1000"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
            all_);
}

TEST_F(ThreadsTest, TheShellOfAJobHasThoseOfItsTasks) {
  EXPECT_EQ(CoresOfTask({{"SLURM_CPUS_PER_TASK", "1"}}), 1);
  EXPECT_EQ(CoresOfTask({{"SLURM_CPUS_PER_TASK", "1"}, {"SLURM_NTASKS", "1"}}), 1);
  // Several tasks have more, and how many of them are on this node is not said.
  EXPECT_EQ(CoresOfTask({{"SLURM_CPUS_PER_TASK", "1"}, {"SLURM_NTASKS", "4"}}), all_);
}

TEST_F(ThreadsTest, VariablesThatMakeNoSenseCountForNothing) {
  for (const char* value : {"0", "-1", "many", ""}) {
    EXPECT_EQ(CoresOfTask({{"SLURM_CPUS_PER_TASK", value}}), all_) << value;
  }
}

}  // namespace
}  // namespace ddp::launchers
