#include "base/signal_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "absl/status/status.h"

namespace ddp {
namespace {

// Global, since a signal handler takes no user argument.
std::atomic<int> handler_fd = -1;
static_assert(std::atomic<int>::is_always_lock_free);

void Handle(int signal) {
  const int error = errno;
  const unsigned char byte = static_cast<unsigned char>(signal);
  // With 64 Ki unread signals the pipe is full and this one is dropped; the reader wakes up anyway.
  [[maybe_unused]] ssize_t written = write(handler_fd, &byte, 1);
  errno = error;
}

// A handler, and not SIG_IGN, which processes that this one starts would inherit.
void Ignore(int) {}

}  // namespace

absl::StatusOr<SignalPipe> SignalPipe::Install(const std::vector<int>& more) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) {
    return absl::ErrnoToStatus(errno, "cannot create a pipe");
  }
  SignalPipe pipe;
  pipe.reader_ = UniqueFd(fds[0]);
  UniqueFd writer(fds[1]);
  int none = -1;
  if (!handler_fd.compare_exchange_strong(none, writer.get())) {
    return absl::FailedPreconditionError("this process waits for signals already");
  }
  pipe.writer_ = std::move(writer);
  std::vector<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE};
  signals.insert(signals.end(), more.begin(), more.end());
  for (int signal : signals) {
    struct sigaction previous;
    sigaction(signal, nullptr, &previous);
    if (signal == SIGHUP && previous.sa_handler == SIG_IGN) continue;
    if (signal == SIGPIPE && previous.sa_handler != SIG_DFL) continue;
    struct sigaction action = {};
    action.sa_handler = signal == SIGPIPE ? Ignore : Handle;
    action.sa_flags = SA_RESTART | SA_NOCLDSTOP;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
    pipe.previous_.emplace_back(signal, previous);
  }
  return pipe;
}

SignalPipe::~SignalPipe() {
  if (!writer_.ok()) return;  // moved from, or never installed
  for (const auto& [signal, previous] : previous_) sigaction(signal, &previous, nullptr);
  handler_fd = -1;
}

std::vector<int> SignalPipe::Take() {
  std::vector<int> signals;
  unsigned char bytes[256];
  for (ssize_t size; (size = read(reader_.get(), bytes, sizeof(bytes))) > 0;) {
    signals.insert(signals.end(), bytes, bytes + size);
  }
  return signals;
}

bool SignalPipe::WasIgnored(int signal) const {
  return std::any_of(previous_.begin(), previous_.end(), [&](const auto& before) {
    return before.first == signal && before.second.sa_handler == SIG_IGN;
  });
}

}  // namespace ddp
