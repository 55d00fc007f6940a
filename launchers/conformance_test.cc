// Requirements for every launcher; runs for each linked launcher. A new launcher adds a Sample.

#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"

namespace ddp::launchers {
namespace {

using Variables = std::map<std::string, std::string>;

struct Sample {
  std::string launcher;
  // The environment of each rank of one job: three ranks, two of them on the first node, unless the
  // launcher knows one node only.
  std::vector<Variables> ranks;
  std::vector<int> nodes;  // node rank of each
  // Variables of rank 1. Without any one of them its environment is incomplete.
  std::vector<std::string> required = {};
  // Changes to rank 1's variables, with each of which they contradict each other or make no sense.
  std::vector<Variables> contradictions = {};
  // Further environments, of which Detect makes a rank or none: other spellings of the same, and
  // whatever optional variable is not among the above.
  std::vector<Variables> others = {};
};

Sample Torchrun() {
  Sample sample = {.launcher = "torchrun", .ranks = {}, .nodes = {0, 0, 1}};
  const int local_sizes[] = {2, 2, 1};
  const int local_ranks[] = {0, 1, 0};
  for (int i = 0; i < 3; ++i) {
    sample.ranks.push_back({{"RANK", absl::StrCat(i)},
                            {"WORLD_SIZE", "3"},
                            {"LOCAL_RANK", absl::StrCat(local_ranks[i])},
                            {"LOCAL_WORLD_SIZE", absl::StrCat(local_sizes[i])},
                            {"GROUP_RANK", absl::StrCat(sample.nodes[i])},
                            {"MASTER_ADDR", "node0"},
                            {"MASTER_PORT", "29500"},
                            {"TORCHELASTIC_RESTART_COUNT", "2"},
                            {"TORCHELASTIC_RUN_ID", "job7"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  }
  sample.required = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                     "MASTER_ADDR", "MASTER_PORT"};
  sample.contradictions = {{{"RANK", "3"}},
                           {{"RANK", "-1"}},
                           {{"RANK", "one"}},
                           {{"WORLD_SIZE", "0"}},
                           {{"LOCAL_RANK", "2"}},
                           {{"LOCAL_WORLD_SIZE", "4"}},
                           {{"GROUP_RANK", "2"}},
                           {{"MASTER_PORT", "0"}},
                           {{"MASTER_PORT", "65536"}},
                           {{"MASTER_ADDR", "tcp://node0"}},
                           {{"MASTER_ADDR", "[::1]:29500"}},
                           {{"WORLD_SIZE", "1e3"}},
                           {{"LOCAL_WORLD_SIZE", "3"}, {"LOCAL_RANK", "0"}},
                           {{"TORCHELASTIC_RESTART_COUNT", "x"}}};
  // A descriptor is rank 0's alone, and must be a listening socket to be taken.
  sample.others = {{{"RANK", "1"},
                    {"WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "node0"},
                    {"MASTER_PORT", "29500"},
                    {"DDP_MASTER_LISTEN_FD", "3"}}};
  return sample;
}

Sample Local() {
  Sample sample = Torchrun();
  sample.launcher = "local";
  for (Variables& rank : sample.ranks) rank["DDP_LAUNCHER"] = "local";
  for (Variables& other : sample.others) other["DDP_LAUNCHER"] = "local";
  return sample;
}

Sample Slurm() {
  Sample sample = {.launcher = "slurm", .ranks = {}, .nodes = {0, 0, 1}};
  const int local_ranks[] = {0, 1, 0};
  for (int i = 0; i < 3; ++i) {
    sample.ranks.push_back({{"SLURM_JOB_ID", "4711"},
                            {"SLURM_STEP_ID", "0"},
                            {"SLURM_PROCID", absl::StrCat(i)},
                            {"SLURM_STEP_NUM_TASKS", "3"},
                            {"SLURM_LOCALID", absl::StrCat(local_ranks[i])},
                            {"SLURM_NODEID", absl::StrCat(sample.nodes[i])},
                            {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                            {"SLURM_STEP_NODELIST", "gpu[01-02]"}});
  }
  sample.required = {"SLURM_JOB_ID",       "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                     "SLURM_LOCALID",      "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
                     "SLURM_STEP_NODELIST"};
  sample.contradictions = {{{"SLURM_PROCID", "3"}},
                           {{"SLURM_STEP_NUM_TASKS", "4"}},
                           {{"SLURM_STEP_NUM_TASKS", "0"}},
                           {{"SLURM_LOCALID", "2"}},
                           {{"SLURM_NODEID", "2"}},
                           {{"SLURM_JOB_ID", "abc"}},
                           {{"SLURM_STEP_ID", "x"}},
                           {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}},
                           {{"SLURM_STEP_NODELIST", "gpu[1-3]"}},
                           {{"SLURM_STEP_NODELIST", "gpu[1-"}},
                           {{"MASTER_ADDR", "node0:29500"}},
                           {{"MASTER_PORT", "x"}}};
  sample.others = {{{"SLURM_JOBID", "4711"},
                    {"SLURM_STEPID", "0"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "2"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "0"},
                    {"SLURM_TASKS_PER_NODE", "1(x2)"},
                    {"SLURM_JOB_NODELIST", "gpu[01-02]"},
                    {"SLURM_RESTART_COUNT", "1"},
                    {"MASTER_ADDR", "gpu09"},
                    {"MASTER_PORT", "2000"}},
                   {{"SLURM_JOBID", "4711"},
                    {"SLURM_STEPID", "0"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NPROCS", "2"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "0"},
                    {"SLURM_TASKS_PER_NODE", "1(x2)"},
                    {"SLURM_NODELIST", "gpu[01-02]"}},
                   // These are shells of jobs of one task.
                   {{"SLURM_JOB_ID", "4711"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_HET_SIZE", "1"},
                    {"SLURM_NTASKS", "1"},
                    {"SLURM_JOB_NUM_NODES", "1"}},
                   {{"SLURM_JOB_ID", "4711"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NPROCS", "1"},
                    {"SLURM_NNODES", "1"}}};
  return sample;
}

Sample Mpi() {
  Sample sample = {.launcher = "mpi", .ranks = {}, .nodes = {0, 0, 0}};
  for (int i = 0; i < 3; ++i) {
    sample.ranks.push_back({{"OMPI_COMM_WORLD_RANK", absl::StrCat(i)},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", absl::StrCat(i)},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"OMPI_COMM_WORLD_NODE_RANK", absl::StrCat(i)},
                            {"PMIX_NAMESPACE", "1092943873"},
                            {"PMIX_RANK", absl::StrCat(i)}});
  }
  sample.required = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                     "OMPI_COMM_WORLD_LOCAL_SIZE"};
  sample.contradictions = {{{"OMPI_COMM_WORLD_RANK", "3"}},
                           {{"OMPI_COMM_WORLD_SIZE", "2"}},
                           {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}},
                           {{"OMPI_COMM_WORLD_LOCAL_SIZE", "0"}}};
  // These are MPICH's and Intel's variables, within a SLURM job or not; PMIx's; Open MPI's without
  // PMIx's name of the job; and those of Open MPI 4 and 5 on several nodes.
  sample.others = {
      {{"PMI_RANK", "1"},
       {"PMI_SIZE", "2"},
       {"MPI_LOCALRANKID", "1"},
       {"MPI_LOCALNRANKS", "2"},
       {"PMI_JOBID", "8"},
       {"MASTER_ADDR", "node0"},
       {"MASTER_PORT", "2000"}},
      {{"PMI_RANK", "1"},
       {"PMI_SIZE", "2"},
       {"MPI_LOCALRANKID", "1"},
       {"MPI_LOCALNRANKS", "2"},
       {"PMI_JOBID", "8"}},
      {{"PMIX_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_LOCAL_RANK", "1"}, {"PMI_LOCAL_SIZE", "2"}},
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"SLURM_STEP_ID", "0"}},
      {{"OMPI_COMM_WORLD_RANK", "0"},
       {"OMPI_COMM_WORLD_SIZE", "1"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
       {"OMPI_MCA_ess_base_jobid", "9"}},
      {{"OMPI_COMM_WORLD_RANK", "0"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
       {"OMPI_MCA_orte_hnp_uri", "5.0;tcp://10.77.0.1:39623"},
       {"OMPI_MCA_orte_local_daemon_uri", "5.0;tcp://10.77.0.1:39623"}},
      {{"OMPI_COMM_WORLD_RANK", "0"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
       {"PMIX_NAMESPACE", "prterun-node0-4711@1"},
       {"PMIX_SERVER_URI4", "prterun-node0-4711@0.0;tcp4://127.0.0.1:59673"}}};
  return sample;
}

std::vector<Sample> Samples() { return {Local(), Mpi(), Slurm(), Torchrun()}; }

TEST(LaunchersTest, AllAreLinkedAndHaveASample) {
  std::vector<std::string> names;
  for (const Sample& sample : Samples()) names.push_back(sample.launcher);
  EXPECT_EQ(LauncherRegistry::Names(), names);
  EXPECT_EQ(LauncherRegistry::Names(),
            (std::vector<std::string>{"local", "mpi", "slurm", "torchrun"}));
}

class ConformanceTest : public testing::TestWithParam<Sample> {
 protected:
  const Sample& sample() const { return GetParam(); }
  std::unique_ptr<Launcher> launcher_ = *CreateLauncher(GetParam().launcher);

  absl::StatusOr<std::optional<Rank>> Detect(Variables variables) const {
    return launcher_->Detect(Environment(std::move(variables)));
  }
};

TEST_P(ConformanceTest, HasTheNameItIsRegisteredBy) {
  EXPECT_EQ(launcher_->name(), sample().launcher);
}

TEST_P(ConformanceTest, RecognisesItsOwnRanks) {
  std::set<std::pair<int, int>> places;
  for (size_t i = 0; i < sample().ranks.size(); ++i) {
    absl::StatusOr<std::optional<Rank>> found = Detect(sample().ranks[i]);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE(found->has_value());
    const Rank& rank = **found;
    EXPECT_EQ(rank.rank, i);
    EXPECT_EQ(rank.world_size, sample().ranks.size());
    EXPECT_EQ(rank.node_rank, sample().nodes[i]);
    EXPECT_GE(rank.local_rank, 0);
    EXPECT_LT(rank.local_rank, rank.local_world_size);
    EXPECT_EQ(rank.local_world_size,
              std::count(sample().nodes.begin(), sample().nodes.end(), rank.node_rank));
    EXPECT_TRUE(places.insert({rank.node_rank, rank.local_rank}).second);
    EXPECT_FALSE(rank.master_listen_fd.has_value());
  }
}

TEST_P(ConformanceTest, RanksAgreeOnTheirJob) {
  const Rank first = **Detect(sample().ranks[0]);
  EXPECT_FALSE(first.master_addr.empty());
  EXPECT_GT(first.master_port, 1024);
  EXPECT_NE(first.run_id, "none");
  for (const Variables& variables : sample().ranks) {
    const Rank rank = **Detect(variables);
    EXPECT_EQ(rank.master_addr, first.master_addr);
    EXPECT_EQ(rank.master_port, first.master_port);
    EXPECT_EQ(rank.master_is_external, first.master_is_external);
    EXPECT_EQ(rank.run_id, first.run_id);
    EXPECT_EQ(rank.restart_count, first.restart_count);
  }
}

TEST_P(ConformanceTest, FindsNothingWhereNothingIs) {
  const std::vector<Variables> strange = {
      {},
      {{"PATH", "/bin"}, {"HOME", "/"}},
      // People set these variables; they are no sign of a job.
      {{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}, {"SLURM_CONF", "/etc/slurm.conf"}}};
  for (const Variables& variables : strange) {
    absl::StatusOr<std::optional<Rank>> found = Detect(variables);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_FALSE(found->has_value());
  }
}

TEST_P(ConformanceTest, HalfSetIsAnErrorThatListsWhatIsSet) {
  for (const std::string& missing : sample().required) {
    Variables variables = sample().ranks[1];
    ASSERT_EQ(variables.erase(missing), 1u) << missing;
    const absl::Status status = Detect(variables).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << missing;
    for (const std::string& name : launcher_->Variables()) {
      if (!variables.contains(name)) continue;
      EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(name, "=", variables[name])))
          << "without " << missing << ", lacks " << name << ": " << status.message();
    }
  }
}

TEST_P(ConformanceTest, ContradictionsAreErrorsThatListThem) {
  for (const Variables& changes : sample().contradictions) {
    Variables variables = sample().ranks[1];
    for (const auto& [name, value] : changes) variables[name] = value;
    const absl::Status status = Detect(variables).status();
    const std::string what = absl::StrJoin(changes, " ", absl::PairFormatter("="));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
    for (const auto& [name, value] : changes) {
      EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(name, "=", value)))
          << what << ": " << status.message();
    }
  }
}

// The result as text: all fields of a rank, no rank, or the code of an error. It leaves out the
// error's message, which repeats the variables.
std::string Outcome(const absl::StatusOr<std::optional<Rank>>& found) {
  if (!found.ok()) return absl::StatusCodeToString(found.status().code());
  if (!found->has_value()) return "none";
  const Rank& rank = **found;
  return absl::StrJoin(
      std::make_tuple(rank.rank, rank.world_size, rank.local_rank, rank.local_world_size,
                      rank.node_rank, rank.master_addr, rank.master_port, rank.master_is_external,
                      rank.restart_count, rank.run_id, rank.master_listen_fd.value_or(-1)),
      " ");
}

// All environments of a sample in which Detect returns a rank or nullopt.
std::vector<Variables> Sound(const Sample& sample) {
  std::vector<Variables> all = sample.ranks;
  all.insert(all.end(), sample.others.begin(), sample.others.end());
  return all;
}

// Detect may read a variable only where another is absent or has some value. So it is asked in each
// environment, of its own and of the other launchers, and in those that lack up to three variables.
TEST_P(ConformanceTest, ReadsOnlyVariablesThatItLists) {
  const std::vector<std::string> listed = launcher_->Variables();
  std::set<std::string> read;
  int asked = 0;
  std::function<void(const Variables&, Variables::const_iterator, int)> ask =
      [&](const Variables& variables, Variables::const_iterator from, int depth) {
        Environment env(variables);
        env.RecordReads(&read);
        (void)launcher_->Detect(env);
        ++asked;
        if (depth == 0) return;
        for (auto it = from; it != variables.end(); ++it) {
          Variables fewer = variables;
          fewer.erase(it->first);
          ask(fewer, fewer.upper_bound(it->first), depth - 1);
        }
      };
  Variables everything;
  for (const Sample& sample : Samples()) {
    for (const Variables& variables : Sound(sample)) {
      ask(variables, variables.begin(), /*depth=*/3);
      everything.insert(variables.begin(), variables.end());
    }
  }
  ask(everything, everything.begin(), /*depth=*/2);
  EXPECT_GT(asked, 1000);
  EXPECT_FALSE(read.empty());
  for (const std::string& name : read) {
    EXPECT_NE(std::find(listed.begin(), listed.end(), name), listed.end()) << name;
  }
}

TEST_P(ConformanceTest, EveryVariableThatItListsMatters) {
  std::set<std::string> matters;
  for (const Variables& variables : Sound(sample())) {
    const absl::StatusOr<std::optional<Rank>> before = Detect(variables);
    ASSERT_TRUE(before.ok()) << before.status();
    for (const auto& [name, value] : variables) {
      Variables fewer = variables, other = variables;
      fewer.erase(name);
      other[name] = "another";
      if (Outcome(Detect(fewer)) != Outcome(before) || Outcome(Detect(other)) != Outcome(before)) {
        matters.insert(name);
      }
    }
  }
  // It matters only in a process that has a terminal (slurm_test.cc).
  matters.insert("SLURM_PTY_PORT");
  for (const std::string& name : launcher_->Variables()) {
    EXPECT_TRUE(matters.contains(name)) << name;
  }
}

TEST_P(ConformanceTest, ReadsNothingOfTheProcessItself) {
  for (const Variables& variables : Sound(sample())) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    EXPECT_EQ(Outcome(Detect({})), "none");
    for (const auto& [name, value] : variables) unsetenv(name.c_str());
  }
}

TEST_P(ConformanceTest, SaysHowToStartWhereItCannot) {
  EXPECT_FALSE(launcher_->HowToStart().empty());
  if (launcher_->StartsRanks()) return;
  const absl::Status status = launcher_->Launch({.argv = {"/bin/true"}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(status.message(), launcher_->HowToStart())) << status;
}

TEST_P(ConformanceTest, AutoChoosesIt) {
  for (const Variables& variables : sample().ranks) {
    absl::StatusOr<Choice> choice = Choose({}, Environment(variables));
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->launcher->name(), sample().launcher);
    ASSERT_TRUE(choice->rank.has_value());
    EXPECT_TRUE(absl::StrContains(choice->reason, sample().launcher)) << choice->reason;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceTest, testing::ValuesIn(Samples()),
                         [](const auto& info) { return info.param.launcher; });

}  // namespace
}  // namespace ddp::launchers
