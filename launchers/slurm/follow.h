// Waits for a submitted job: copies its log to standard output as it grows, and says on standard
// error when its state changes.
//
//   DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install());
//   … submit …
//   DDP_ASSIGN_OR_RETURN(LaunchResult result,
//                        Follow({.id = "12", .folder = "/stage/jobs/a"}, signals));
//   return result.exit_code;
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/signal_pipe.h"
#include "launchers/launcher.h"

namespace ddp::launchers::slurm {

struct FollowOptions {
  std::string id;
  std::string folder;  // of its BatchJob
  // SIGINT, SIGTERM and SIGHUP cancel the job instead of leaving it alone.
  bool cancel_on_interrupt = false;

  // Polling interval of the log. squeue is polled less often the longer nothing changes.
  absl::Duration log_interval = absl::Milliseconds(200);
  absl::Duration first_queue_interval = absl::Seconds(5);
  absl::Duration last_queue_interval = absl::Seconds(15);
  // The exit code of a job that squeue no longer lists is waited for this long: the folder may be
  // on a file system whose clients see changes late.
  absl::Duration patience = absl::Seconds(10);
};

// Returns the job's exit code once it has ended, also if SLURM has begun it again meanwhile, or
// what Interrupted returns after a signal, also one that came before the call; the description
// names the log, and says what became of the job. Cancelled if the job has left the queue without
// an exit code. Thread-compatible.
absl::StatusOr<LaunchResult> Follow(const FollowOptions& options, SignalPipe& signals);

// Cancels the job after `signal`, or leaves it, as the options say, and describes that. The exit
// code is that of the signal: 130 for SIGINT. Thread-safe.
LaunchResult Interrupted(const FollowOptions& options, int signal);

}  // namespace ddp::launchers::slurm
