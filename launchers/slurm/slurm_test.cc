// Specific to launcher slurm; the rest is in launchers/conformance_test.cc.
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp::launchers {
namespace {

// The environment that `srun -N3 -n7` in a job of four nodes gives to the first task of the last
// node.
std::map<std::string, std::string> Task() {
  return {{"SLURM_JOB_ID", "4711"},
          {"SLURM_STEP_ID", "3"},
          {"SLURM_PROCID", "6"},
          {"SLURM_NTASKS", "8"},
          {"SLURM_STEP_NUM_TASKS", "7"},
          {"SLURM_LOCALID", "0"},
          {"SLURM_NODEID", "2"},
          {"SLURM_JOB_NUM_NODES", "4"},
          {"SLURM_JOB_NODELIST", "gpu[07-10]"},
          {"SLURM_TASKS_PER_NODE", "2(x4)"},
          {"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"},
          {"SLURM_STEP_NODELIST", "gpu[08-10]"},
          {"SLURM_RESTART_COUNT", "1"}};
}

Rank Detect(std::map<std::string, std::string> variables) {
  return **(*CreateLauncher("slurm"))->Detect(Environment(std::move(variables)));
}

TEST(SlurmTest, StepCountsNotTheJob) {
  const Rank rank = Detect(Task());
  EXPECT_EQ(rank.rank, 6);
  EXPECT_EQ(rank.world_size, 7);
  EXPECT_EQ(rank.local_rank, 0);
  EXPECT_EQ(rank.local_world_size, 1);
  EXPECT_EQ(rank.node_rank, 2);
  EXPECT_EQ(rank.master_addr, "gpu08");
  EXPECT_EQ(rank.master_port, 25814);
  EXPECT_EQ(rank.restart_count, 1);
  EXPECT_EQ(rank.run_id, "slurm-4711.3");
}

TEST(SlurmTest, MasterCanBeGiven) {
  auto variables = Task();
  variables["MASTER_ADDR"] = "10.0.0.1";
  variables["MASTER_PORT"] = "31000";
  const Rank rank = Detect(variables);
  EXPECT_EQ(rank.master_addr, "10.0.0.1");
  EXPECT_EQ(rank.master_port, 31000);
}

TEST(SlurmTest, OneNodeNeedsNoName) {
  auto variables = Task();
  variables["SLURM_PROCID"] = variables["SLURM_LOCALID"] = "1";
  variables["SLURM_NODEID"] = "0";
  variables["SLURM_STEP_NUM_TASKS"] = variables["SLURM_STEP_TASKS_PER_NODE"] = "2";
  variables["SLURM_STEP_NODELIST"] = "gpu08";
  EXPECT_EQ(Detect(variables).master_addr, "127.0.0.1");
}

}  // namespace
}  // namespace ddp::launchers
