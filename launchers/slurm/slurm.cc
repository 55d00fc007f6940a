// Launcher `slurm`: ranks started by srun, in an allocation or in a job that it submits.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/implementation_options.h"
#include "base/option_error.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "launchers/detect.h"
#include "launchers/launcher.h"
#include "launchers/slurm/nodelist.h"
#include "launchers/slurm/options.h"
#include "launchers/slurm/queue.h"
#include "launchers/slurm/submit.h"

namespace ddp::launchers {
namespace {

constexpr absl::string_view kHowToStart = "srun --nodes=N --ntasks-per-node=M PROGRAM [ARGUMENT…]";
constexpr absl::string_view kHowToSubmit =
    "PROGRAM launcher=slurm nnodes=N nproc_per_node=M [ARGUMENT…]";

// Steps above this number are SLURM's own: batch script, interactive shell, external processes
// (slurm.h: SLURM_MAX_NORMAL_STEP_ID).
constexpr int64_t kMaxNormalStep = 0xfffffff0;

// The first of `names` that is set.
std::optional<std::string> First(const Environment& env, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (std::optional<std::string> value = env.Get(name)) return value;
  }
  return std::nullopt;
}

// Number of the job step this process is a task of; nullopt in the shell of sbatch or salloc, whose
// environment has SLURM_PROCID=0 and the size of the whole allocation as well.
absl::StatusOr<std::optional<int64_t>> Step(const Environment& env) {
  for (absl::string_view name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    if (!env.Has(name)) continue;
    DDP_ASSIGN_OR_RETURN(int64_t step, env.GetInt(name, 0, UINT32_MAX));
    if (step <= kMaxNormalStep) return step;
    return std::nullopt;
  }
  return std::nullopt;
}

// The components of a heterogeneous job have node lists and counts of their own.
absl::Status CheckUniform(const Environment& env) {
  DDP_ASSIGN_OR_RETURN(std::optional<int> components, FirstInt(env, {"SLURM_HET_SIZE"}));
  if (components.value_or(1) <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "this is a component of a heterogeneous SLURM job, which is not supported");
}

// A shell inside an allocation is not a rank. With one task it may start ranks locally; with more,
// srun was probably forgotten. salloc's shell is where salloc was called, often a login node.
absl::Status CheckShell(const Environment& env) {
  if (!env.Has("SLURM_PROCID")) {
    return absl::InvalidArgumentError(
        "this is the shell of salloc, and need not be on a node of its job");
  }
  DDP_ASSIGN_OR_RETURN(std::optional<int> tasks, FirstInt(env, {"SLURM_NTASKS", "SLURM_NPROCS"}));
  DDP_ASSIGN_OR_RETURN(std::optional<int> nodes,
                       FirstInt(env, {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"}));
  if (tasks.value_or(1) <= 1 && nodes.value_or(1) <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("this is the shell of a SLURM job of ", nodes.value_or(1), " nodes and ",
                   tasks.value_or(nodes.value_or(1)), " tasks, not one of its tasks"));
}

// The name of the program that has started this process.
std::string ParentName() {
  std::string name = ReadFile(absl::StrCat("/proc/", getppid(), "/comm")).value_or("");
  return std::string(absl::StripSuffix(name, "\n"));
}

// Whether this process was started in a shell of `srun --pty`: the shell is a task, with all
// variables of one, and what it starts inherits them. So do the tasks of a further srun there, but
// the terminal is the shell's alone.
bool IsInTaskShell(const Environment& env) {
  if (!env.Has("SLURM_PTY_PORT") || ParentName() == "slurmstepd") return false;
  return UniqueFd(open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC)).ok();
}

absl::Status CheckTaskShell(const Environment& env) {
  DDP_ASSIGN_OR_RETURN(std::optional<int> tasks,
                       FirstInt(env, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}));
  if (tasks.value_or(1) <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("this is a shell of srun --pty with ", *tasks, " tasks, not one of its tasks"));
}

// Reads the local world size, and the address of the step's first node.
absl::Status ReadNodes(const Environment& env, Rank& rank) {
  const std::optional<std::string> tasks_text =
      First(env, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (!tasks_text) return absl::InvalidArgumentError("SLURM_STEP_TASKS_PER_NODE is missing");
  DDP_ASSIGN_OR_RETURN(std::vector<int> tasks, ExpandTasksPerNode(*tasks_text));
  if (std::accumulate(tasks.begin(), tasks.end(), int64_t{0}) != rank.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("tasks per node '", *tasks_text, "' are not ", rank.world_size, " tasks"));
  }
  const int nodes = static_cast<int>(tasks.size());
  if (rank.node_rank >= nodes) {
    return absl::InvalidArgumentError(
        absl::StrCat("node ", rank.node_rank, " is not below the number of nodes ", nodes));
  }
  rank.local_world_size = tasks[rank.node_rank];
  if (nodes == 1) return absl::OkStatus();  // keep Rank's default, the loopback address

  const std::optional<std::string> list =
      First(env, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  if (!list) return absl::InvalidArgumentError("SLURM_STEP_NODELIST is missing");
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> names, ExpandNodeList(*list));
  if (static_cast<int>(names.size()) != nodes) {
    return absl::InvalidArgumentError(absl::StrCat("node list '", *list, "' has ", names.size(),
                                                   " names, tasks per node '", *tasks_text,
                                                   "' have ", nodes));
  }
  rank.master_addr = names.front();
  return absl::OkStatus();
}

absl::StatusOr<Rank> ReadTask(const Environment& env, int64_t step) {
  Rank rank;
  const std::pair<std::vector<std::string>, int*> required[] = {
      {{"SLURM_PROCID"}, &rank.rank},
      {{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"}, &rank.world_size},
      {{"SLURM_LOCALID"}, &rank.local_rank},
      {{"SLURM_NODEID"}, &rank.node_rank},
  };
  for (const auto& [names, field] : required) {
    DDP_ASSIGN_OR_RETURN(std::optional<int> value, FirstInt(env, names));
    if (!value) return absl::InvalidArgumentError(absl::StrCat(names.front(), " is missing"));
    *field = *value;
  }
  DDP_RETURN_IF_ERROR(ReadNodes(env, rank));

  const absl::string_view job_variable = env.Has("SLURM_JOB_ID") ? "SLURM_JOB_ID" : "SLURM_JOBID";
  if (!env.Has(job_variable)) return absl::InvalidArgumentError("SLURM_JOB_ID is missing");
  DDP_ASSIGN_OR_RETURN(int64_t job, env.GetInt(job_variable, 0, INT64_MAX));
  rank.run_id = absl::StrCat("slurm-", job, ".", step);
  rank.master_port = PortFromJob(job, step);
  DDP_ASSIGN_OR_RETURN(rank.restart_count, RequeuesOfJob(env));

  if (std::optional<std::string> address = env.Get("MASTER_ADDR")) rank.master_addr = *address;
  DDP_ASSIGN_OR_RETURN(std::optional<int> port, FirstInt(env, {"MASTER_PORT"}, 65535));
  rank.master_port = port.value_or(rank.master_port);
  return rank;
}

class SlurmLauncher : public Launcher {
 public:
  absl::string_view name() const override { return "slurm"; }

  absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const override {
    const std::string remedy = absl::StrCat("start with: ", kHowToStart);
    bool any = false;
    for (absl::string_view name :
         {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEPID"}) {
      any = any || env.Has(name);
    }
    if (!any) return std::nullopt;
    if (absl::Status uniform = CheckUniform(env); !uniform.ok()) {
      return BadEnvironment(uniform.message(), env, Variables(),
                            "submit a job whose nodes ask for the same");
    }
    absl::StatusOr<std::optional<int64_t>> step = Step(env);
    if (!step.ok()) return BadEnvironment(step.status().message(), env, Variables(), remedy);
    const bool in_task_shell = *step && IsInTaskShell(env);
    if (!*step || in_task_shell) {
      const absl::Status shell = in_task_shell ? CheckTaskShell(env) : CheckShell(env);
      if (!shell.ok()) {
        return BadEnvironment(
            shell.message(), env, Variables(),
            absl::StrCat(remedy, "; or give launcher=local to start ranks on this machine only"));
      }
      return std::nullopt;
    }
    absl::StatusOr<Rank> rank = ReadTask(env, **step);
    if (!rank.ok()) return BadEnvironment(rank.status().message(), env, Variables(), remedy);
    DDP_RETURN_IF_ERROR(CheckRank(*rank, env, Variables(), remedy));
    return *std::move(rank);
  }

  std::vector<std::string> Variables() const override {
    // Each variable comes with its older names and fallbacks.
    return {"SLURM_JOB_ID",         "SLURM_JOBID",          "SLURM_STEP_ID",
            "SLURM_STEPID",         "SLURM_PROCID",         "SLURM_PTY_PORT",
            "SLURM_HET_SIZE",       "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
            "SLURM_NPROCS",         "SLURM_LOCALID",        "SLURM_NODEID",
            "SLURM_JOB_NUM_NODES",  "SLURM_NNODES",         "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST",  "SLURM_JOB_NODELIST",
            "SLURM_NODELIST",       "SLURM_RESTART_COUNT",  "MASTER_ADDR",
            "MASTER_PORT"};
  }

  std::string HowToStart() const override {
    return absl::StrCat(kHowToStart, "; to submit it as a job: ", kHowToSubmit);
  }

  bool StartsRanks() const override { return true; }
  bool Queues() const override { return true; }

  absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) override {
    DDP_RETURN_IF_ERROR(CheckOutside());
    return slurm::Launch(options);
  }

  absl::StatusOr<std::vector<absl::Status>> Submit(
      const std::vector<BatchJob>& jobs, int at_once,
      const std::vector<std::string>& unfinished) override {
    DDP_RETURN_IF_ERROR(CheckOutside());
    // Standard output is the caller's, for a report on the jobs.
    return slurm::Submit(jobs, at_once, unfinished, stderr);
  }

  absl::StatusOr<std::map<std::string, std::string>> Unfinished(
      const std::vector<std::string>& ids) override {
    return slurm::States(ids);
  }

  QueueMode Mode(const LaunchOptions& options) const override {
    const auto slurm = options.implementations.Get<SlurmOptions>(name());
    return {.wait = slurm.wait, .dry_run = slurm.dry_run};
  }

  absl::Status Interrupt(const LaunchOptions& options,
                         const std::vector<std::string>& ids) override {
    const bool cancel = options.implementations.Get<SlurmOptions>(name()).on_interrupt == "cancel";
    const slurm::Cancellation end =
        cancel ? slurm::Cancel(ids) : slurm::Cancellation{.cancelled = {}, .status = {}};
    const std::vector<std::string>& said = cancel ? end.cancelled : ids;
    if (!said.empty()) {
      std::fprintf(stderr, "%s %s\n",
                   cancel ? "cancelled:" : "left in the queue:", absl::StrJoin(said, " ").c_str());
    }
    return end.status;
  }

 private:
  // In a job's shell its user means the nodes that are there.
  absl::Status CheckOutside() const {
    const Environment env = Environment::FromProcess();
    const std::optional<std::string> job = First(env, {"SLURM_JOB_ID", "SLURM_JOBID"});
    if (!job) return absl::OkStatus();
    return OptionError("launcher", name(),
                       absl::StrCat("submits no job from within SLURM job ", *job,
                                    "; start ranks in this job with: ", kHowToStart,
                                    "; or unset SLURM_JOB_ID and SLURM_JOBID"),
                       absl::StatusCode::kFailedPrecondition);
  }
};

const Registration<LauncherRegistry> kSlurm("slurm",
                                            LauncherEntry{
                                                .create = +[]() -> std::unique_ptr<Launcher> {
                                                  return std::make_unique<SlurmLauncher>();
                                                },
                                                .options = &AnyOptions::Of<SlurmOptions>,
                                                .detect_order = kDetectSlurm});

}  // namespace
}  // namespace ddp::launchers
