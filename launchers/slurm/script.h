// The batch script of submitted jobs.
//
//   const std::string script = BatchScript({.launch = {.nnodes = 2, .nproc_per_node = 8},
//                                           .name = "train", .program = "/stage/builds/…/train",
//                                           .chdir = "/home/me", .folder = "/stage/jobs/7",
//                                           .jobs = {{.folder = "/stage/jobs/7",
//                                                     .argv = {"train", "--epochs=2"}}}});
//
// For each job the script removes a stale BatchJob::kExitCode, adds a line to kAttempts (and to
// kId, if whoever submitted it could not), runs SlurmOptions::setup, starts the ranks with srun,
// writes kExitCode and ends with that code: that of the first rank that failed, 128 + 15 after
// SIGTERM.
//
// If SLURM begins the job again (preemption, a node's failure, SlurmOptions::requeue) there is no
// exit code. The script then runs again from its beginning, with its output appended to the log.
// With SlurmOptions::requeue it passes the signal before the time limit to the ranks, and has SLURM
// queue the job again when they have stopped. All of this is done outside of the ranks, which may
// be in a container.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "launchers/launcher.h"
#include "launchers/slurm/options.h"

namespace ddp::launchers::slurm {

struct ScriptOptions {
  // Nodes, ranks per node, environment of the ranks, and SlurmOptions. `argv` is not used.
  LaunchOptions launch = {};
  std::string name;     // the job's, in the queue's listing
  std::string program;  // what runs, in place of the jobs' argv[0]
  std::string chdir;    // working folder of the ranks
  // SLURM's own messages, such as "CANCELLED … DUE TO TIME LIMIT", go into BatchJob::kLog of this
  // folder. It is the job's folder; that of an array has a link to each job's folder, named by its
  // index.
  std::string folder;
  std::vector<BatchJob> jobs = {};  // several make an array
  int at_once = 0;                  // jobs of an array; 0: no limit
  std::string after = "";           // ids of jobs whose ends these wait for: "41:42"
};

// Functions are pure and thread-safe.

SlurmOptions SlurmOptionsOf(const LaunchOptions& options);

// options.nproc_per_node; if it is unset, one rank for each GPU that the job asks for
// (SlurmOptions::gpus_per_node); otherwise options.default_nproc_per_node. The devices of this
// machine have no influence.
int TasksPerNode(const LaunchOptions& options);

std::string BatchScript(const ScriptOptions& options);

// Groups the elements of a list by options, since commas separate them: {"--exclude=a,b"} for
// {"--exclude=a", "b"}.
std::vector<std::string> JoinedElements(const std::vector<std::string>& elements);

// SlurmOptions::signal, "USR2@120". `seconds` is -1 if there are none.
struct RequeueSignal {
  std::string name;
  int seconds = -1;
};
RequeueSignal SignalOf(absl::string_view text);

// `word` as one word of bash: unchanged if it has only harmless characters, else in single quotes.
std::string BashWord(absl::string_view word);

}  // namespace ddp::launchers::slurm
