// Submits jobs to SLURM.
//
//   options.implementations.Mutable<SlurmOptions>("slurm").partition = "gpu";
//   options.argv = {"/repo/bazel-bin/tools/train", "--epochs=2"};
//   DDP_ASSIGN_OR_RETURN(LaunchResult result, slurm::Launch(options));
//
// Files, in SlurmOptions::stage_dir:
//   builds/HASH/                     programs with their runfiles (stage.h)
//   jobs/TIME-PROGRAM-PID/job.sh     the script (script.h)
//   jobs/TIME-PROGRAM-PID/job_id …   BatchJob's files
//   jobs/TIME-PROGRAM-PID/0, 1, …    of an array instead: links to the jobs' folders
//
// Errors: OptionErrors for invalid options, a stage_dir that cannot be written, and a machine
// without SLURM; those of stage.h and queue.h. Nothing is left of a job that could not be
// submitted. Submit is thread-safe; Launch that waits is not, since it catches signals.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launchers/launcher.h"

namespace ddp::launchers::slurm {

// Makes a job of options.argv and submits it. With SlurmOptions::wait its exit code is the
// result's.
absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options);

// Launcher::Submit. All jobs run the same program. Prints ids, scripts and logs to `notes`, and for
// a dry run the scripts to standard output.
//
// Jobs with the same request are one array, of at most MaxArraySize jobs. With `at_once` each array
// waits for the end of the one before, and the first for that of `unfinished`, since SLURM limits
// the jobs of a single array.
absl::StatusOr<std::vector<absl::Status>> Submit(const std::vector<BatchJob>& jobs, int at_once,
                                                 const std::vector<std::string>& unfinished,
                                                 std::FILE* notes);

}  // namespace ddp::launchers::slurm
