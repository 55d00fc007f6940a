// Runs the jobs of a sweep on this machine, several at a time.
//
//   DDP_ASSIGN_OR_RETURN(int signal, RunLocally(commands, {.at_once = 2}, on_change));
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/config/job.h"

namespace ddp::config {

struct LocalJob {
  std::string folder;             // see launchers::BatchJob; exists
  std::vector<std::string> argv;  // program (a path, the same for all) and its arguments
};

struct LocalJobsOptions {
  int at_once = 1;
  // Time between SIGTERM and SIGKILL for the jobs that run, after a signal to this process. Jobs
  // that handle SIGTERM, as those of the trainer do in order to save, are waited for.
  absl::Duration grace = absl::Seconds(3);
};

// Runs all jobs, in order; returns when all have ended. All run the program as its file is now,
// also if that is replaced meanwhile. Each of the `at_once` has its share (shares.h) of this
// process's cores, by CPU affinity, from which programs and launcher local take their numbers of
// threads, and of its GPUs, by CUDA_VISIBLE_DEVICES. Output goes to BatchJob::kLog, the exit code
// (128 + signal) to BatchJob::kExitCode. Jobs cannot outlive this process. `changed` is called with
// the index of a job when it has started (kRunning) and when it has ended (kFinished or kFailed).
//
// SIGINT, SIGTERM or SIGHUP to this process ends the jobs that run, which then have no exit code,
// and starts no further ones; the result is that signal, else 0. A further signal, a second or more
// later, kills them. A job that cannot be started has failed; the others run. Errors: those of the
// program's file, if there are jobs.
absl::StatusOr<int> RunLocally(const std::vector<LocalJob>& jobs, const LocalJobsOptions& options,
                               const std::function<void(size_t job, JobState state)>& changed);

}  // namespace ddp::config
