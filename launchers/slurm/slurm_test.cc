// Specific to launcher slurm; the rest is in launchers/conformance_test.cc.
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
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

absl::StatusOr<std::optional<Rank>> TryDetect(std::map<std::string, std::string> variables) {
  return (*CreateLauncher("slurm"))->Detect(Environment(std::move(variables)));
}

std::string RefusalOf(std::map<std::string, std::string> variables) {
  return std::string(TryDetect(std::move(variables)).status().message());
}

TEST(SlurmTest, HeterogeneousJobIsRefusedByName) {
  auto variables = Task();
  variables["SLURM_HET_SIZE"] = "2";
  const std::string message = RefusalOf(variables);
  EXPECT_TRUE(absl::StrContains(message, "a heterogeneous SLURM job")) << message;
}

// Its shell is where salloc was called, which may be a login node.
TEST(SlurmTest, ShellOfSallocStartsNothing) {
  std::map<std::string, std::string> variables = {
      {"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NUM_NODES", "1"}};
  const std::string message = RefusalOf(variables);
  EXPECT_TRUE(absl::StrContains(message, "the shell of salloc")) << message;
  EXPECT_TRUE(absl::StrContains(message, "srun --nodes=")) << message;
  EXPECT_TRUE(absl::StrContains(message, "launcher=local")) << message;
  // In a batch script it is on the job's node.
  variables["SLURM_PROCID"] = "0";
  const auto rank = TryDetect(variables);
  ASSERT_TRUE(rank.ok()) << rank.status();
  EXPECT_FALSE(rank->has_value());
}

// What Detect makes of `variables` in a process that has a terminal: "shell", "rank", or an error.
std::string DetectInTerminal(const std::map<std::string, std::string>& variables) {
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    const auto rank = TryDetect(variables);
    const std::string text = !rank.ok()          ? std::string(rank.status().message())
                             : rank->has_value() ? "rank"
                                                 : "shell";
    _exit(write(1, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  std::string text;
  char buffer[4096];
  ssize_t size = 0;
  while ((size = read(terminal, buffer, sizeof(buffer))) > 0) {
    text.append(buffer, static_cast<size_t>(size));
  }
  close(terminal);
  waitpid(pid, nullptr, 0);
  return text;
}

// A shell of `srun --pty` is a task; what is started in it is none.
TEST(SlurmTest, ShellOfATaskIsNoRank) {
  auto variables = Task();
  variables["SLURM_PROCID"] = variables["SLURM_NODEID"] = "0";
  variables["SLURM_STEP_NUM_TASKS"] = variables["SLURM_STEP_TASKS_PER_NODE"] = "1";
  variables["SLURM_STEP_NODELIST"] = "gpu08";
  EXPECT_EQ(DetectInTerminal(variables), "rank");
  variables["SLURM_PTY_PORT"] = "40000";
  EXPECT_EQ(DetectInTerminal(variables), "shell");
  variables["SLURM_STEP_NUM_TASKS"] = "4";
  const std::string message = DetectInTerminal(variables);
  EXPECT_TRUE(absl::StrContains(message, "a shell of srun --pty with 4 tasks")) << message;
  EXPECT_TRUE(absl::StrContains(message, "launcher=local")) << message;
  // A task of another srun in that shell has no terminal.
  const pid_t pid = fork();
  if (pid == 0) {
    setsid();
    variables["SLURM_STEP_NUM_TASKS"] = "1";
    const auto rank = TryDetect(variables);
    _exit(rank.ok() && rank->has_value() ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ddp::launchers
