#include "base/command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/environment.h"
#include "base/process.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace ddp {
namespace {

// One of the program's output streams.
struct Stream {
  UniqueFd reader;
  UniqueFd writer;
  std::string text;
};

absl::Status Open(Stream& stream) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot create a pipe");
  stream.reader = UniqueFd(fds[0]);
  stream.writer = UniqueFd(fds[1]);
  return absl::OkStatus();
}

// Reads what there is; closes the reader at the end of file.
void Read(Stream& stream) {
  char buffer[1 << 14];
  const ssize_t size = read(stream.reader.get(), buffer, sizeof(buffer));
  if (size > 0) {
    stream.text.append(buffer, static_cast<size_t>(size));
  } else if (size == 0 || errno != EINTR) {
    stream.reader.Close();
  }
}

// Reads both until both have ended. False after `deadline`.
bool ReadAll(Stream& out, Stream& err, absl::Time deadline) {
  while (out.reader.ok() || err.reader.ok()) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    // poll skips negative descriptors.
    pollfd fds[] = {{.fd = out.reader.get(), .events = POLLIN, .revents = 0},
                    {.fd = err.reader.get(), .events = POLLIN, .revents = 0}};
    const absl::Duration wait = std::min(left, absl::Minutes(1));
    if (poll(fds, 2, static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1) <= 0) continue;
    if (fds[0].revents != 0) Read(out);
    if (fds[1].revents != 0) Read(err);
  }
  return true;
}

int WaitFor(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return ExitCodeOf(status);
}

}  // namespace

absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv,
                                         const std::map<std::string, std::string>& environment,
                                         absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  Stream out, err;
  DDP_RETURN_IF_ERROR(Open(out));
  DDP_RETURN_IF_ERROR(Open(err));
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null.ok()) return absl::ErrnoToStatus(errno, "cannot open /dev/null");
  DDP_ASSIGN_OR_RETURN(const pid_t pid, StartProcess({.argv = argv,
                                                      .environment = environment,
                                                      .stdin_fd = null.get(),
                                                      .stdout_fd = out.writer.get(),
                                                      .stderr_fd = err.writer.get(),
                                                      .inherited_fds = {}}));
  out.writer.Close();
  err.writer.Close();
  const bool ended = ReadAll(out, err, deadline);
  if (!ended) kill(-pid, SIGKILL);  // the process leads a group of its own
  const int code = WaitFor(pid);
  if (!ended) {
    return absl::DeadlineExceededError(
        absl::StrCat("'", argv[0], "' has not ended after ", absl::FormatDuration(timeout)));
  }
  return CommandResult{code, std::move(out.text), std::move(err.text)};
}

absl::StatusOr<CommandResult> RunCommand(const std::vector<std::string>& argv,
                                         absl::Duration timeout) {
  return RunCommand(argv, Environment::FromProcess().variables(), timeout);
}

}  // namespace ddp
