// The batch script of submitted jobs.
//
//   const std::string script = BatchScript({.slurm = slurm, .nnodes = 2, .ntasks_per_node = 8,
//                                           .name = "train", .program = "/stage/builds/…/train",
//                                           .chdir = "/home/me", .folder = "/stage/jobs/7",
//                                           .jobs = {{.folder = "/stage/jobs/7",
//                                                     .argv = {"train", "--epochs=2"}}}});
//
// For each job the script removes a stale BatchJob::kExitCode, starts the ranks with srun, writes
// BatchJob::kExitCode and ends with that code, also if it gets SIGTERM (128 + 15). Run again by
// SLURM after a requeue, it starts anew; its output is appended to the log.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "launchers/launcher.h"
#include "launchers/slurm/options.h"

namespace ddp::launchers::slurm {

struct ScriptOptions {
  SlurmOptions slurm = {};
  int nnodes = 1;
  int ntasks_per_node = 1;
  std::string name;     // the job's, in the queue's listing
  std::string program;  // what runs, in place of the jobs' argv[0]
  std::string chdir;    // working folder of the ranks
  // Where SLURM's own messages go, such as "CANCELLED … DUE TO TIME LIMIT": into BatchJob::kLog of
  // this folder. It is the job's folder; that of an array has a link to each job's folder, named by
  // its index.
  std::string folder;
  std::map<std::string, std::string> environment = {};  // set for the ranks
  std::vector<BatchJob> jobs = {};                      // several make an array
  int at_once = 0;                                      // jobs of an array; 0: no limit
};

// Functions are pure and thread-safe.
std::string BatchScript(const ScriptOptions& options);

// slurm.extra by sbatch's options: {"--exclude=a,b"} for {"--exclude=a", "b"}.
std::vector<std::string> ExtraLines(const SlurmOptions& slurm);

// `word` as one word of bash: unchanged if it has only harmless characters, else in single quotes.
std::string BashWord(absl::string_view word);

}  // namespace ddp::launchers::slurm
