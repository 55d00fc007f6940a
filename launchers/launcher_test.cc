#include "launchers/launcher.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

const Environment kTorchrun = {{"RANK", "1"},           {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "2"},
                               {"GROUP_RANK", "0"},     {"MASTER_ADDR", "node0"},
                               {"MASTER_PORT", "29500"}};

// The variables of `a` and of `b`.
Environment Merge(const Environment& a, const Environment& b) {
  auto variables = a.variables();
  variables.insert(b.variables().begin(), b.variables().end());
  return Environment(variables);
}

// A task of `srun -N2 -n2`.
const Environment kSlurmTask = {{"SLURM_JOB_ID", "7"},
                                {"SLURM_STEP_ID", "0"},
                                {"SLURM_PROCID", "1"},
                                {"SLURM_STEP_NUM_TASKS", "2"},
                                {"SLURM_NTASKS", "2"},
                                {"SLURM_LOCALID", "0"},
                                {"SLURM_NODEID", "1"},
                                {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                {"SLURM_STEP_NODELIST", "ddp[1-2]"}};

// The script of `sbatch -N2 -n2`.
const Environment kSlurmScript = {{"SLURM_JOB_ID", "7"},
                                  {"SLURM_PROCID", "0"},
                                  {"SLURM_NTASKS", "2"},
                                  {"SLURM_LOCALID", "0"},
                                  {"SLURM_NODEID", "0"},
                                  {"SLURM_JOB_NUM_NODES", "2"},
                                  {"SLURM_TASKS_PER_NODE", "1(x2)"}};

const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "0"},
                              {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"PMIX_NAMESPACE", "5"},
                              {"PMIX_RANK", "0"}};

// A user-defined launcher. Detects SITE=1 and starts ranks. Its name sorts before local.
class SiteLauncher : public Launcher {
 public:
  absl::string_view name() const override { return "cluster"; }
  absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const override {
    if (!env.Has("SITE")) return std::nullopt;
    return Rank();
  }
  bool StartsRanks() const override { return true; }
  std::vector<std::string> Variables() const override { return {"SITE"}; }
  std::string HowToStart() const override { return "site PROGRAM"; }
};

const Registration<LauncherRegistry> kSite("cluster",
                                           LauncherEntry{
                                               .create = +[]() -> std::unique_ptr<Launcher> {
                                                 return std::make_unique<SiteLauncher>();
                                               }});

absl::StatusOr<Choice> ChooseBy(absl::string_view name, std::optional<int> nproc_per_node,
                                const Environment& env) {
  return Choose({.name = std::string(name), .nproc_per_node = nproc_per_node}, env);
}

std::string Chosen(const Environment& env, absl::string_view name = "auto",
                   std::optional<int> nproc_per_node = std::nullopt) {
  absl::StatusOr<Choice> choice = ChooseBy(name, nproc_per_node, env);
  return choice.ok() ? std::string(choice->launcher->name()) : choice.status().ToString();
}

// Expects InvalidArgument and returns its message.
std::string Refusal(const Environment& env, absl::string_view name,
                    std::optional<int> nproc_per_node = std::nullopt) {
  const absl::Status status = ChooseBy(name, nproc_per_node, env).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(ChooseTest, AutoTakesTheMostSpecific) {
  EXPECT_EQ(Chosen({}), "local");
  EXPECT_EQ(Chosen(kTorchrun), "torchrun");
  EXPECT_EQ(Chosen(kSlurmTask), "slurm");
  EXPECT_EQ(Chosen(kOpenMpi), "mpi");
  EXPECT_EQ(Chosen(Merge(kTorchrun, {{"DDP_LAUNCHER", "local"}})), "local");
  EXPECT_EQ(Chosen(Merge(kTorchrun, kSlurmTask)), "torchrun");    // srun torchrun …
  EXPECT_EQ(Chosen(Merge(kTorchrun, kSlurmScript)), "torchrun");  // torchrun in a batch script
  EXPECT_EQ(Chosen(Merge(kOpenMpi, kSlurmTask)), "mpi");          // mpirun, which uses srun itself
}

TEST(ChooseTest, SrunsOwnPmiIsSlurm) {
  EXPECT_EQ(Chosen(Merge(kSlurmTask, {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "7.0"}})),
            "slurm");
  EXPECT_EQ(Chosen(Merge(kSlurmTask, {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "slurm.pmix.7.0"}})),
            "slurm");
  // MPICH's mpirun within an allocation: two ranks in the one task of each node.
  EXPECT_EQ(Chosen(Merge(kSlurmTask, {{"PMI_RANK", "0"},
                                      {"PMI_SIZE", "4"},
                                      {"MPI_LOCALRANKID", "0"},
                                      {"MPI_LOCALNRANKS", "2"},
                                      {"MASTER_ADDR", "ddp1"}})),
            "mpi");
}

TEST(ChooseTest, LaunchersOfOthersComeBeforeOursButAfterOurChildren) {
  const Environment site = {{"SITE", "1"}};
  EXPECT_EQ(Chosen(Merge(site, Merge(kTorchrun, kSlurmTask))), "cluster");
  EXPECT_EQ(Chosen(Merge(site, Merge(kTorchrun, {{"DDP_LAUNCHER", "local"}}))), "local");
  EXPECT_FALSE(ChooseBy("cluster", 2, {})->rank.has_value());  // it is to start them
}

// The ranks of such a launcher run on other machines: a single process here would not be the
// requested job.
TEST(ChooseTest, OneRankOfALauncherThatStartsRanksElsewhereIsNotThisProcess) {
  const Choice choice = *ChooseBy("cluster", 1, {});
  EXPECT_FALSE(choice.rank.has_value());
  EXPECT_TRUE(choice.announce);
  EXPECT_FALSE(choice.launcher->StartsRanksHere());
}

TEST(ChooseTest, SlurmIsSubmittedToOnlyIfItIsNamed) {
  for (int n : {1, 2}) {
    const Choice choice = *ChooseBy("slurm", n, {});
    EXPECT_FALSE(choice.rank.has_value());
    EXPECT_TRUE(choice.launcher->Queues());
    EXPECT_FALSE(choice.launcher->StartsRanksHere());
    EXPECT_EQ(choice.reason, "slurm: as requested; this process submits a job");
    EXPECT_EQ(Chosen({}, "auto", n), "local");
  }
  // What is submitted is the same command, which is a rank in the job.
  const Choice task = *ChooseBy("slurm", 1, kSlurmTask);
  EXPECT_EQ(task.rank->rank, 1);
}

TEST(ChooseTest, OneProcessOfTheJobAnnouncesTheChoice) {
  EXPECT_TRUE(ChooseBy("local", 2, {})->announce);
  Environment child = Merge(kTorchrun, {{"DDP_LAUNCHER", "local"}});
  EXPECT_FALSE(ChooseBy("auto", std::nullopt, child)->announce);
  auto rank_0 = kSlurmTask.variables();
  rank_0["SLURM_PROCID"] = rank_0["SLURM_NODEID"] = "0";
  EXPECT_TRUE(ChooseBy("auto", std::nullopt, Environment(rank_0))->announce);
  EXPECT_FALSE(ChooseBy("auto", std::nullopt, kSlurmTask)->announce);
}

TEST(ChooseTest, SeveralRestartsNeedAProcessThatStartsThem) {
  EXPECT_FALSE(Choose({.nproc_per_node = 1, .max_restarts = 1}, {})->rank.has_value());
}

TEST(ChooseTest, NoJobMeansLocal) {
  const Choice alone = *ChooseBy("auto", 1, {});
  ASSERT_TRUE(alone.rank.has_value());
  EXPECT_EQ(alone.rank->world_size, 1);
  EXPECT_FALSE(ChooseBy("auto", 2, {})->rank.has_value());
  EXPECT_FALSE(ChooseBy("local", 2, {})->rank.has_value());
  EXPECT_TRUE(Choose({}, {})->rank.has_value());
  EXPECT_FALSE(Choose({.default_nproc_per_node = 2}, {})->rank.has_value());
  EXPECT_FALSE(Choose({.default_nproc_here = 2}, {})->rank.has_value());
  EXPECT_TRUE(Choose({.default_nproc_per_node = 2, .default_nproc_here = 1}, {})->rank.has_value());
}

// The rank is a new process, since this one has its environment already.
TEST(ChooseTest, ARankWithAnEnvironmentOfItsOwnIsStarted) {
  EXPECT_FALSE(Choose({.environment = {{"A", "1"}}}, {})->rank.has_value());
}

TEST(ChooseTest, NumberOfRanksMustMakeSense) {
  for (int n : {0, -1}) {
    EXPECT_TRUE(absl::StrContains(Refusal({}, "auto", n), absl::StrCat("nproc_per_node=", n)));
  }
}

TEST(ChooseTest, NumberOfRanksMustAgreeWithTheEnvironment) {
  EXPECT_EQ(Chosen(kTorchrun, "auto", 2), "torchrun");
  const std::string message = Refusal(kTorchrun, "auto", 3);
  EXPECT_TRUE(absl::StrContains(message, "nproc_per_node=3")) << message;
  EXPECT_TRUE(absl::StrContains(message, "LOCAL_WORLD_SIZE=2")) << message;
}

TEST(ChooseTest, NumberOfRanksMayBeAnyThatVariablesWithoutItAllow) {
  const Environment env = {{"RANK", "1"},
                           {"WORLD_SIZE", "4"},
                           {"LOCAL_RANK", "1"},
                           {"MASTER_ADDR", "h"},
                           {"MASTER_PORT", "1"}};
  for (const int n : {2, 3, 4}) EXPECT_EQ(Chosen(env, "auto", n), "torchrun");
  for (const int n : {1, 5}) {
    const std::string message = Refusal(env, "auto", n);
    EXPECT_TRUE(absl::StrContains(message, "LOCAL_RANK 1 and WORLD_SIZE 4")) << message;
  }
}

// A pod of Kubernetes' PyTorchJob of one replica, or a leftover of one.
TEST(ChooseTest, InAJobOfOneRankTheRemedyIsToStartRanksHere) {
  const Environment pod = {{"RANK", "0"},
                           {"WORLD_SIZE", "1"},
                           {"MASTER_ADDR", "job-master-0"},
                           {"MASTER_PORT", "23456"}};
  EXPECT_TRUE(absl::StrContains(Refusal(pod, "auto", 8), "launcher=local"));
  EXPECT_TRUE(
      absl::StrContains(Choose({.max_restarts = 3}, pod).status().message(), "launcher=local"));
  EXPECT_EQ(Chosen(pod, "local", 8), "local");
  EXPECT_TRUE(absl::StrContains(Refusal({{"WORLD_SIZE", "1"}}, "auto", 8), "launcher=local"));
  EXPECT_FALSE(absl::StrContains(Refusal(kTorchrun, "auto", 3), "launcher=local"));
}

TEST(ChooseTest, WordsAreCountedWhereTheRanksAreStarted) {
  const auto choose = [](const char* name, Nproc::Kind kind, std::optional<int> gpus,
                         const Environment& env) {
    return Choose({.name = name, .nproc_per_node = Nproc(kind), .default_nproc_here = gpus}, env);
  };
  using Kind = Nproc::Kind;
  EXPECT_EQ(choose("auto", Kind::kGpu, 1, {})->rank->world_size, 1);
  EXPECT_FALSE(choose("auto", Kind::kGpu, 8, {})->rank.has_value());
  EXPECT_FALSE(choose("auto", Kind::kAuto, 8, {})->rank.has_value());
  EXPECT_EQ(choose("auto", Kind::kGpu, std::nullopt, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  // Elsewhere other machines would have to count them.
  EXPECT_TRUE(
      absl::StrContains(choose("slurm", Kind::kGpu, 8, {}).status().message(), "give a number"));
  // Those of a running job are started already.
  for (const Kind kind : {Kind::kGpu, Kind::kCpu, Kind::kAuto}) {
    EXPECT_EQ(choose("auto", kind, std::nullopt, kTorchrun)->rank->world_size, 4);
  }
}

TEST(NprocTest, IsReadAsTorchrunDoes) {
  for (const char* text : {"", "gpu", "cpu", "auto", "7"}) {
    Nproc nproc = 3;
    ASSERT_TRUE(ParseOption(text, nproc).ok());
    EXPECT_EQ(FormatOption(nproc), text);
  }
  LaunchOptions options{.nproc_per_node = Nproc(Nproc::Kind::kAuto), .default_nproc_here = 5};
  EXPECT_EQ(options.NprocHere(), 5);
  options.default_nproc_here.reset();
  const int cores = options.NprocHere();
  EXPECT_GE(cores, 1);
  options.nproc_per_node = Nproc(Nproc::Kind::kCpu);
  options.default_nproc_here = cores + 1;
  EXPECT_EQ(options.NprocHere(), cores);
  Nproc bad;
  EXPECT_TRUE(absl::StrContains(ParseOption("many", bad).message(), "gpu, cpu, auto"));
}

TEST(ChooseTest, NumberOfNodesMustBePossibleInTheEnvironment) {
  const auto choose = [](int nnodes, const Environment& env) {
    return Choose({.nnodes = nnodes}, env).status();
  };
  for (int nnodes : {2, 3}) EXPECT_EQ(choose(nnodes, kTorchrun), absl::OkStatus());  // 2 of 4 here
  EXPECT_EQ(choose(1, kTorchrun), absl::OkStatus());                                 // the default
  EXPECT_EQ(choose(2, kSlurmTask), absl::OkStatus());
  for (const auto& [nnodes, env] :
       {std::pair(4, kTorchrun), std::pair(3, kSlurmTask), std::pair(2, kOpenMpi)}) {
    const absl::Status status = choose(nnodes, env);
    ASSERT_TRUE(ProblemOf(status)) << status;
    EXPECT_EQ(ProblemOf(status)->path, "nnodes");
    EXPECT_TRUE(absl::StrContains(status.message(), "disagrees with the environment")) << status;
  }
  EXPECT_TRUE(absl::StrContains(choose(4, kTorchrun).message(),
                                "WORLD_SIZE 4 and LOCAL_WORLD_SIZE 2 (set: RANK=1"));
}

// Only the launcher that restarts ranks can do so, and only before it has started them.
TEST(ChooseTest, RestartsOfAnotherLaunchersRanksAreRefused) {
  for (const Environment& env : {kTorchrun, kSlurmTask, kOpenMpi}) {
    EXPECT_EQ(Choose({}, env).status(), absl::OkStatus());
    const absl::Status status = Choose({.max_restarts = 3}, env).status();
    ASSERT_TRUE(ProblemOf(status)) << status;
    EXPECT_EQ(ProblemOf(status)->path, "max_restarts");
  }
  const Environment of_local = Merge(kTorchrun, {{"DDP_LAUNCHER", "local"}});
  for (const Environment& env : {Environment(), of_local}) {
    EXPECT_EQ(Choose({.max_restarts = 3}, env).status(), absl::OkStatus());
  }
}

TEST(ChooseTest, UnknownNameListsWhatThereIs) {
  const absl::Status status = ChooseBy("pbs", std::nullopt, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "auto, cluster, local, mpi, slurm, torchrun"))
      << status;
}

TEST(ChooseTest, AbsentLauncherSaysHowToStartIt) {
  EXPECT_TRUE(absl::StrContains(Refusal({}, "torchrun"), "torchrun --no-python "));
  EXPECT_TRUE(absl::StrContains(Refusal({}, "mpi"), "mpirun "));
  const std::string elsewhere = Refusal(kOpenMpi, "torchrun");
  EXPECT_TRUE(absl::StrContains(elsewhere, "rank 0 of 2 of launcher 'mpi'")) << elsewhere;
}

TEST(ChooseTest, RanksOfALargerJobStartNoJob) {
  for (const Environment& env : {kTorchrun, kSlurmTask, kOpenMpi}) {
    EXPECT_TRUE(absl::StrContains(Refusal(env, "local", 2), "inside rank"));
  }
  for (const Environment& env : {kTorchrun, kOpenMpi}) {
    EXPECT_TRUE(absl::StrContains(Refusal(env, "slurm", 2), "inside rank"));
  }
  // A job of one task is an interactive shell as often as not (srun --pty bash).
  const Environment shell = {{"SLURM_JOB_ID", "7"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_PROCID", "0"},
                             {"SLURM_STEP_NUM_TASKS", "1"},
                             {"SLURM_LOCALID", "0"},
                             {"SLURM_NODEID", "0"},
                             {"SLURM_STEP_TASKS_PER_NODE", "1"}};
  EXPECT_EQ(Chosen(shell), "slurm");
  EXPECT_EQ(Chosen(shell, "local", 2), "local");
}

TEST(ChooseTest, ShellOfASlurmJobIsNoRank) {
  const std::string message = Refusal(kSlurmScript, "auto");
  EXPECT_TRUE(absl::StrContains(message, "start with: srun ")) << message;
  EXPECT_EQ(Chosen(kSlurmScript, "local", 2), "local");
  EXPECT_TRUE(absl::StrContains(Refusal(kSlurmScript, "slurm"), "start with: srun "));
  EXPECT_EQ(Chosen({{"SLURM_JOB_ID", "7"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "1"},
                    {"SLURM_JOB_NUM_NODES", "1"}}),
            "local");
  // Steps that are none of srun's: the number of the interactive one.
  EXPECT_EQ(Chosen({{"SLURM_JOB_ID", "7"},
                    {"SLURM_STEP_ID", "4294967290"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "1"}}),
            "local");
}

// The script of a job that was requeued twice.
const Environment kRequeued = {{"SLURM_JOB_ID", "7"},
                               {"SLURM_PROCID", "0"},
                               {"SLURM_NTASKS", "1"},
                               {"SLURM_RESTART_COUNT", "2"}};

const Environment kOneRank = {{"RANK", "0"},           {"WORLD_SIZE", "1"},
                              {"LOCAL_RANK", "0"},     {"LOCAL_WORLD_SIZE", "1"},
                              {"GROUP_RANK", "0"},     {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", "29500"}};

// SLURM runs the script of a requeued job once more, whatever the script starts.
TEST(ChooseTest, ARequeuedJobIsALaterLifeUnderEachLauncher) {
  const auto lives = [](const Environment& env) {
    const absl::StatusOr<Choice> choice = ChooseBy("auto", 1, env);
    return choice.ok() && choice->rank ? choice->rank->restart_count : -1;
  };
  EXPECT_EQ(lives(kRequeued), 2);
  EXPECT_EQ(lives(Merge(kOneRank, kRequeued)), 2);
  EXPECT_EQ(lives(Merge(Merge(kOneRank, {{"TORCHELASTIC_RESTART_COUNT", "3"}}), kRequeued)), 3);
  EXPECT_EQ(lives({{"SLURM_RESTART_COUNT", "2"}}), 0);  // left over, in no job
}

TEST(ChooseTest, AJobHasOneNameInAllItsLives) {
  const auto job = [](const Environment& env) {
    const absl::StatusOr<Choice> choice = ChooseBy("auto", 1, env);
    return choice.ok() && choice->rank ? choice->rank->job : choice.status().ToString();
  };
  for (const Environment& env : {Environment(), kOneRank, kSlurmTask}) {
    EXPECT_EQ(job(Merge(env, kRequeued)), "slurm-7");
  }
  const Environment named = Merge(kOneRank, {{"TORCHELASTIC_RUN_ID", "mine"}});
  EXPECT_EQ(job(named), "mine");
  EXPECT_EQ(job(Merge(named, kRequeued)), "slurm-7");
  // As torchrun calls each run without a name.
  EXPECT_EQ(job(Merge(kOneRank, {{"TORCHELASTIC_RUN_ID", "none"},
                                 {"TORCHELASTIC_RESTART_COUNT", "1"},
                                 {"TORCHELASTIC_ERROR_FILE",
                                  "/tmp/torchelastic_a/none_b/attempt_1/0/error.json"}})),
            "torchrun-none_b");
  EXPECT_EQ(job({}), "none");
}

TEST(ChooseTest, RunsInOneAllocationOfSlurmShareItsJob) {
  const auto is_shared = [](const Environment& env) {
    const absl::StatusOr<Choice> choice = ChooseBy("auto", 1, env);
    EXPECT_TRUE(choice.ok() && choice->rank) << choice.status();
    return choice.ok() && choice->rank && choice->rank->job_is_shared;
  };
  const Environment of_local = Merge(kOneRank, {{"DDP_LAUNCHER", "local"}});
  for (const Environment& env : {Environment(), of_local, kSlurmTask}) {
    EXPECT_TRUE(is_shared(Merge(env, kRequeued)));
  }
  for (const Environment& env : {Environment(), of_local, kOneRank}) EXPECT_FALSE(is_shared(env));
  // torchrun starts ranks anew without counting that, where nodes join.
  EXPECT_FALSE(is_shared(Merge(kOneRank, kRequeued)));
}

TEST(ChooseTest, ACountOfRequeuesThatIsNoneIsNamedUnderEachLauncher) {
  for (const Environment& env : {Environment(), kOneRank, kSlurmTask}) {
    const Environment odd = Merge(Merge(env, {{"SLURM_RESTART_COUNT", "x"}}), kRequeued);
    const std::string message = Refusal(odd, "auto", 1);
    EXPECT_TRUE(absl::StrContains(message, "SLURM_RESTART_COUNT='x' is not an integer")) << message;
  }
}

TEST(ChooseTest, HalfSetVariablesNameTheLauncher) {
  const std::string message = Refusal({{"RANK", "0"}}, "auto");
  EXPECT_TRUE(absl::StrContains(message, "launcher 'torchrun'")) << message;
  EXPECT_TRUE(absl::StrContains(message, "RANK=0")) << message;
  EXPECT_TRUE(absl::StrContains(Refusal({{"DDP_LAUNCHER", "local"}}, "auto"), "RANK is missing"));
}

}  // namespace
}  // namespace ddp::launchers
