#include "launchers/slurm/follow.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/signal_pipe.h"
#include "base/status.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"
#include "launchers/slurm/queue.h"

namespace ddp::launchers::slurm {
namespace {

// Exit codes above it are those of signals.
constexpr int kSignalBase = 128;
constexpr char kQueued[] = "queued";
constexpr char kEnded[] = "ended";

std::string LogOf(const FollowOptions& options) {
  return absl::StrCat(options.folder, "/", BatchJob::kLog);
}

class Follower {
 public:
  explicit Follower(const FollowOptions& options)
      : options_(options), log_(LogOf(options)), interval_(options.first_queue_interval) {}

  absl::StatusOr<LaunchResult> Run(SignalPipe& signals) {
    while (true) {
      // The code is read before the log is copied: if there is one, the log is complete.
      const std::optional<int> code = ReadExitCode(options_.folder);
      CopyLog();
      if (code && IsFinal(*code)) {
        Say(absl::StrCat("ended with exit code ", *code));
        LaunchResult result = {.exit_code = *code, .failed_rank = -1, .description = {}};
        if (*code != 0) {
          result.description =
              absl::StrCat("job ", options_.id, " ended with exit code ", *code, "; log: ", log_);
        }
        return result;
      }
      if (!code) asked_with_code_ = false;
      DDP_RETURN_IF_ERROR(AskQueue());
      pollfd wait = {.fd = signals.fd(), .events = POLLIN, .revents = 0};
      poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(options_.log_interval)));
      for (const int signal : signals.Take()) {
        if (signal != SIGCHLD) return Interrupted(options_, signal);  // squeue is a child
      }
    }
  }

 private:
  void Say(absl::string_view what) const {
    std::fflush(stdout);
    const std::string line = absl::StrCat("job ", options_.id, ": ", what, "\n");
    std::fwrite(line.data(), 1, line.size(), stderr);
  }

  // After a signal the job may be in the queue again without its script's knowledge, so that one is
  // asked first.
  bool IsFinal(int code) {
    if (code <= kSignalBase) return true;
    if (std::exchange(asked_with_code_, true)) return state_ != kQueued;
    next_question_ = absl::InfinitePast();
    return false;
  }

  // Copies what has been appended since the last call.
  void CopyLog() {
    const absl::StatusOr<FileReader> log = FileReader::Open(log_);
    if (!log.ok()) return;  // not begun
    char piece[1 << 16];
    while (copied_ < log->size()) {
      const size_t size = std::min<uint64_t>(sizeof(piece), log->size() - copied_);
      if (!log->ReadAt(copied_, piece, size).ok()) break;
      std::fwrite(piece, 1, size, stdout);
      copied_ += size;
    }
    std::fflush(stdout);
  }

  // Asks squeue, if it is time to. An error if the job ended long ago without an exit code.
  absl::Status AskQueue() {
    const absl::Time now = absl::Now();
    if (now >= next_question_) {
      const std::string state = State();
      if (state != state_) {
        state_ = state;
        since_ = now;
        interval_ = options_.first_queue_interval;
        if (state_ != kEnded) Say(state_);
      }
      next_question_ = now + interval_;
      interval_ = std::min(interval_ * 1.5, options_.last_queue_interval);
    }
    if (state_ != kEnded) return absl::OkStatus();
    // Makes clients of network file systems look at the folder again.
    ListDirectory(options_.folder).IgnoreError();
    if (now - since_ < options_.patience) return absl::OkStatus();
    return absl::CancelledError(absl::StrCat(
        "job ", options_.id, " is no longer in the queue and has no exit code: it was cancelled, ",
        "or its node failed; see ", log_));
  }

  // What squeue says; the last state if it fails.
  std::string State() {
    const absl::StatusOr<std::map<std::string, std::string>> states = States({options_.id});
    if (states.ok()) {
      squeue_fails_ = false;
      const auto found = states->find(options_.id);
      return found == states->end() ? kEnded : found->second;
    }
    // The controller may be restarting.
    if (!std::exchange(squeue_fails_, true)) {
      Say(absl::StrCat("its state is unknown: ", states.status().message(), "; still waiting"));
    }
    return state_;
  }

  const FollowOptions options_;
  const std::string log_;
  uint64_t copied_ = 0;  // bytes of the log
  std::string state_;
  absl::Time since_;           // of state_
  bool squeue_fails_ = false;  // and that was said
  absl::Duration interval_;
  absl::Time next_question_ = absl::InfinitePast();
  bool asked_with_code_ = false;  // since the exit code was there
};

}  // namespace

absl::StatusOr<LaunchResult> Follow(const FollowOptions& options, SignalPipe& signals) {
  return Follower(options).Run(signals);
}

LaunchResult Interrupted(const FollowOptions& options, int signal) {
  LaunchResult result = {.exit_code = kSignalBase + signal, .failed_rank = -1, .description = {}};
  if (options.cancel_on_interrupt) {
    const absl::Status cancelled = Cancel({options.id}).status;
    result.description = absl::StrCat(
        "interrupted: job ", options.id,
        cancelled.ok() ? " is cancelled"
                       : absl::StrCat(" could not be cancelled: ", cancelled.message()),
        "; log: ", LogOf(options));
  } else {
    result.description =
        absl::StrCat("interrupted: job ", options.id, " goes on; watch it with 'tail -f ",
                     LogOf(options), "', cancel it with 'scancel ", options.id, "'");
  }
  return result;
}

}  // namespace ddp::launchers::slurm
