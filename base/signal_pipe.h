// Delivers signals through a pipe, so that poll() can wait for them.
//
//   DDP_ASSIGN_OR_RETURN(SignalPipe signals, SignalPipe::Install());
//   … poll signals.fd() for POLLIN …
//   for (int signal : signals.Take()) …
#pragma once

#include <signal.h>

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp {

// While it exists, SIGINT, SIGTERM, SIGHUP, SIGCHLD and `more` are written to the pipe instead of
// having their default effect; SIGHUP stays ignored if it was (nohup). The destructor restores the
// previous handlers. SIGPIPE does nothing meanwhile: who waits for processes outlives the reader of
// its output. Handlers belong to the process, so only one SignalPipe can exist:
// FailedPrecondition for a second. Thread-compatible.
class SignalPipe {
 public:
  static absl::StatusOr<SignalPipe> Install(const std::vector<int>& more = {});
  SignalPipe(SignalPipe&&) = default;
  SignalPipe& operator=(SignalPipe&&) = delete;
  ~SignalPipe();

  // Readable while signals are pending.
  int fd() const { return reader_.get(); }

  // The signals since the last call, in order.
  std::vector<int> Take();

  // Whether a signal was ignored before.
  bool WasIgnored(int signal) const;

 private:
  SignalPipe() = default;

  UniqueFd reader_;
  UniqueFd writer_;
  std::vector<std::pair<int, struct sigaction>> previous_;
};

}  // namespace ddp
