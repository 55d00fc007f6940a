// A launcher supports one way of starting the ranks of a job (torchrun, srun, …): it reads rank and
// world size from the environment that the ranks of such a job get, and some launchers also start
// the ranks.
//
//   DDP_ASSIGN_OR_RETURN(Choice choice, Choose(options, Environment::FromProcess()));
//   if (choice.rank) return RunAs(*choice.rank);  // this process is a rank
//   return choice.launcher->Launch(options);      // this process starts the ranks
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "launchers/nproc.h"
#include "launchers/rank.h"

namespace ddp::launchers {

class Launcher;

// Order in which `auto` calls Detect: children of our own launchers first, then from the most
// specific environment to the least. Reasons: README.md.
enum DetectOrder {
  kDetectOwnChildren = 0,
  kDetectOthers = 10,  // launchers of other repositories
  kDetectTorchrun = 20,
  kDetectMpi = 30,
  kDetectSlurm = 40,
};

struct LauncherEntry {
  std::unique_ptr<Launcher> (*create)() = nullptr;
  // &AnyOptions::Of<…> for this launcher's own options, "launcher.NAME.…"; null: none.
  AnyOptions (*options)() = nullptr;
  int detect_order = kDetectOthers;
  // `auto` uses it to start ranks if no launcher detects a job. At most one launcher sets it.
  bool starts_by_default = false;
};

struct LauncherTag {
  static constexpr absl::string_view kWhat = "launcher";
};
using LauncherRegistry = Registry<LauncherEntry, LauncherTag>;

// "auto" and the names of the linked launchers.
std::vector<std::string> LauncherNames();

// The choice of the launcher, and what it starts. Options of a single launcher are in
// `implementations`.
struct LaunchOptions {
  std::string name = "auto";
  // If it is unset, a launcher that starts ranks takes what its environment says, or one node.
  std::optional<int> nnodes = std::nullopt;
  // If it is unset, a rank of a running job takes any number, and a launcher that starts ranks
  // takes a default (below) or what a queue's own options imply. Words are counted on the machine
  // that starts the ranks; of a running job they fit any number.
  Nproc nproc_per_node = {};
  // Time between SIGTERM and SIGKILL for the other ranks, after one has failed.
  absl::Duration grace = absl::Seconds(3);
  // All ranks are restarted this often, at most, after one has failed: launchers/README.md. Ranks
  // see the count in TORCHELASTIC_RESTART_COUNT.
  int max_restarts = 0;
  ImplementationOptions implementations = ImplementationOptions::From<LauncherRegistry>();

  // The program sets the members below, not its user.
  int default_nproc_per_node = 1;
  // The number of this machine's GPUs, if the ranks are to use them. Replaces
  // default_nproc_per_node for ranks that are started on this machine. It must not influence jobs
  // that run on others.
  std::optional<int> default_nproc_here = std::nullopt;
  std::vector<std::string> argv = {};                   // program (a path) and its arguments
  std::map<std::string, std::string> environment = {};  // added to this process's own

  // Number of nodes to start ranks on.
  int Nnodes() const { return nnodes.value_or(1); }

  // Number of ranks to start on each node: for launchers that start them on other machines, and for
  // those that start them on this one.
  int NprocPerNode() const { return nproc_per_node.value_or(default_nproc_per_node); }
  int NprocHere() const;
};

constexpr auto OptionsOf(const LaunchOptions&) {
  return Options(
      Option("name", &LaunchOptions::name, "launcher that starts the ranks")
          .OneOfThese(&LauncherNames),
      Option("nnodes", &LaunchOptions::nnodes,
             "nodes to start ranks on; auto: what the launcher's environment says, or one")
          .AtLeast(1)
          .AtMost(1e6),
      Option("nproc_per_node", &LaunchOptions::nproc_per_node,
             "ranks on each node; gpu: one for each GPU; cpu: one for each core; auto: gpu or else "
             "cpu; empty: what the launcher's environment says, or the program's default")
          .AtLeast(1)
          .AtMost(1e6),
      Option("grace_s", &LaunchOptions::grace,
             "time between SIGTERM and SIGKILL of the other ranks after one has failed")
          .AtLeast(0)
          .AtMost(1e7),
      Option("max_restarts", &LaunchOptions::max_restarts,
             "maximum number of times that all ranks are restarted after one has failed; three "
             "without progress are the last")
          .AtLeast(0)
          .AtMost(1e6),
      Inline(&LaunchOptions::implementations));
}

// How a launched job ended.
struct LaunchResult {
  int exit_code = 0;  // 0 if every rank exited with 0; else that of the first failure (128+signal)
  int failed_rank = -1;     // the rank that failed first; -1 if none, or if a signal asked to stop
  std::string description;  // "rank 1 (pid 77) was killed by signal 9 (Killed)"; empty if none
};

// One job for a queue. Its folder must exist. The files below are written to it; later calls read
// the state of the job only from them, and from the queue (launchers/queue.h).
struct BatchJob {
  std::string name;               // short, for the queue's listing
  std::string folder;             // an absolute path that the job's nodes see, too
  std::vector<std::string> argv;  // program (a path) and its arguments
  // What the job asks for: nodes, ranks of each, and the queue's own options. Its `argv` is not
  // used.
  LaunchOptions launch = {};

  static constexpr char kLog[] = "job.log";  // standard output and error of all ranks
  // The queue's id of each submission, a line each, the newest last. An earlier one may still be in
  // the queue, where it could not be cancelled or its end was not seen. The newest may have no id
  // yet: kSubmitting, in launchers/queue.h.
  static constexpr char kId[] = "job_id";
  // Decimal; exists once the job has ended. A job that the queue begins again has removed it, or
  // has it until it runs: what the queue says of a job that waits counts for more.
  static constexpr char kExitCode[] = "exit_code";
  // A line for each time the job has begun, in this or an earlier submission.
  static constexpr char kAttempts[] = "attempts";
};

// What the options of a queueing launcher request.
struct QueueMode {
  bool wait = false;     // for the jobs' end
  bool dry_run = false;  // Submit only prints
};

// Thread-compatible. Implementations have no state between calls.
class Launcher {
 public:
  virtual ~Launcher() = default;

  virtual absl::string_view name() const = 0;

  // The rank of this process, if `env` is the environment of a rank of such a job; nullopt if none
  // of its variables are set. InvalidArgument, listing the variables, if some are missing or they
  // contradict each other. Reads nothing but `env`, unless two situations have the same variables.
  virtual absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const = 0;

  // Whether Launch is implemented.
  virtual bool StartsRanks() const { return false; }

  // Whether Launch starts the ranks on this machine, so that their devices and backends can be
  // checked before.
  virtual bool StartsRanksHere() const { return false; }

  // Whether these options mean a single rank that this process can be, without Launch.
  virtual bool RunsInProcess(const LaunchOptions&) const { return false; }

  // Whether ranks that are started again always have a higher Rank::restart_count than before.
  virtual bool CountsRestarts() const { return true; }

  // Starts the ranks and blocks until all have ended. A failed rank is not an error but part of the
  // result. The default returns Unimplemented with the command that starts such a job.
  virtual absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

  // Whether a queue starts the ranks: Launch and Submit return when the job has been queued.
  virtual bool Queues() const { return false; }

  // Queues jobs. Those that ask for the same are one array, as far as the queue's limits allow. At
  // most `at_once` run at the same time (0: no limit), of these jobs and of those with the ids
  // `unfinished`, which are in the queue already. Adds a line to BatchJob::kId of each. Prints
  // where they can be watched, on standard error.
  //
  // The status of each job: the queue may refuse some and take others; of those that it refuses the
  // folder is as before. DeadlineExceeded and DataLoss: the job may be in the queue, or is, though
  // its folder lacks the id. An error instead if nothing was tried, and no folder touched: options
  // that cannot be, no queue on this machine. With QueueMode::dry_run only prints. The default
  // returns Unimplemented.
  virtual absl::StatusOr<std::vector<absl::Status>> Submit(
      const std::vector<BatchJob>& jobs, int at_once, const std::vector<std::string>& unfinished);

  // The jobs among `ids`, lines of BatchJob::kId, that have not ended, with their states: "queued",
  // "running", or "unknown" where a submission has had no answer and may yet take effect. Ask for
  // every job that has an id, also with an exit code: one that is "queued" again has not ended,
  // whatever its folder says; one that is "running" and has an exit code is about to leave. Call it
  // through QueueWatch (launchers/queue.h), which spares the queue.
  virtual absl::StatusOr<std::map<std::string, std::string>> Unfinished(
      const std::vector<std::string>& ids);

  virtual QueueMode Mode(const LaunchOptions&) const { return {}; }

  // The user has interrupted the wait for jobs `ids`: cancels or leaves them, by the options, and
  // prints which. Tries all of them; the error is that of those that could not be cancelled.
  virtual absl::Status Interrupt(const LaunchOptions& options, const std::vector<std::string>& ids);

  // The variables that Detect reads, for messages.
  virtual std::vector<std::string> Variables() const = 0;

  // A command line that starts such a job, for messages.
  virtual std::string HowToStart() const = 0;
};

// NotFound, listing the linked launchers, for an unknown name.
absl::StatusOr<std::unique_ptr<Launcher>> CreateLauncher(absl::string_view name);

// The role of this process: a rank, or the process that starts the ranks.
struct Choice {
  std::unique_ptr<Launcher> launcher;
  std::optional<Rank> rank;  // unset: call launcher->Launch
  bool detected = false;     // `rank` is of a running job, not of a job that begins here
  std::string reason;        // one line for logs: what was chosen and why
  // Whether this process should print `reason`, so that it is printed once per job.
  bool announce = false;
};

// Chooses the launcher named options.name and the role of this process. "auto" takes the first
// launcher that detects a job in `env` (order: launchers/README.md), else the default launcher.
//
// If `env` is not that of a rank, the choice has no rank and the caller calls Launch, except that a
// launcher whose RunsInProcess is true makes this process rank 0 of a world size of 1.
//
// Errors, all OptionErrors but the last:
// - InvalidArgument: options out of range; nproc_per_node differs from the running job's local
//   world size; nnodes exceeds the number of nodes that it can have; a named launcher that cannot
//   start ranks finds none of its variables; a named launcher would start ranks inside a rank of a
//   job of two or more.
// - NotFound: unknown launcher; lists the linked ones.
// - FailedPrecondition: "auto" finds no job and no linked launcher starts ranks.
// - InvalidArgument: variables in `env` are incomplete or contradict each other.
absl::StatusOr<Choice> Choose(const LaunchOptions& options, const Environment& env);

}  // namespace ddp::launchers
