// Signals as something poll() can wait for.
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

namespace ddp::launchers {

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGCHLD are told here instead of having their effect;
// SIGHUP stays ignored where it was (nohup). The destructor restores what was. Handlers are the
// process's own, hence one at a time: FailedPrecondition for a second. Thread-compatible.
class SignalPipe {
 public:
  static absl::StatusOr<SignalPipe> Install();
  SignalPipe(SignalPipe&&) = default;
  SignalPipe& operator=(SignalPipe&&) = delete;
  ~SignalPipe();

  // Readable while signals wait.
  int fd() const { return reader_.get(); }

  // Those that came since the last call, in order.
  std::vector<int> Take();

 private:
  SignalPipe() = default;

  UniqueFd reader_;
  UniqueFd writer_;
  std::vector<std::pair<int, struct sigaction>> previous_;
};

}  // namespace ddp::launchers
