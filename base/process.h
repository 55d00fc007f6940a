// Starts processes that end with this one, and describes how they ended.
//
//   DDP_ASSIGN_OR_RETURN(PosixProcessGroup group, PosixProcessGroup::Create());
//   ProcessOptions options = {.argv = {"/bin/echo", "hi"}, .group = group.id()};
//   DDP_ASSIGN_OR_RETURN(pid_t pid, StartProcess(options));
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace ddp {

// The POSIX process group of one job, led by a watchdog process that waits for this process to end,
// in whatever way, and then kills the group. Linux's parent-death signal reaches only the ranks;
// the group also contains the processes that ranks start. Thread-compatible.
class PosixProcessGroup {
 public:
  static absl::StatusOr<PosixProcessGroup> Create();
  PosixProcessGroup(PosixProcessGroup&& other) noexcept;
  PosixProcessGroup& operator=(PosixProcessGroup&&) = delete;
  // Sends SIGKILL to the group and reaps the watchdog.
  ~PosixProcessGroup();

  pid_t id() const { return watchdog_; }

  // Signals all members. The watchdog reacts to SIGKILL only.
  void Signal(int signal) const;

 private:
  PosixProcessGroup(pid_t watchdog, UniqueFd lifeline);

  pid_t watchdog_;
  UniqueFd lifeline_;  // the watchdog reads the other end: end of file when this process ends
};

struct ProcessOptions {
  std::vector<std::string> argv;  // the program, looked up in PATH if it has no slash; arguments
  std::map<std::string, std::string> environment;  // the complete environment
  // Joins this process group, or leads a new one. Its members ignore SIGTTOU: they may write to the
  // terminal of the group in the foreground.
  pid_t group = 0;
  int stdin_fd = 0;  // become descriptors 0, 1 and 2
  int stdout_fd = 1;
  int stderr_fd = 2;
  std::vector<int> inherited_fds;  // stay open under their numbers
};

// Starts a process that gets SIGKILL when the calling thread ends (Linux ties the parent-death
// signal to the thread): call it from a thread that waits for the process. The caller reaps it.
// NotFound, PermissionDenied and so on, naming the program, if it cannot be executed;
// ResourceExhausted, naming the limits, if the system allows no further process.
absl::StatusOr<pid_t> StartProcess(const ProcessOptions& options);

// Whether a process has a handler for a signal; false where /proc is not mounted.
bool HandlesSignal(pid_t pid, int signal);

// The exit code that a shell reports for waitpid's `status`: 128 + signal for a killed process.
int ExitCodeOf(int status);

// Number and name of a signal: "9 (Killed)".
std::string SignalName(int signal);

// The program that this process runs, with links resolved: argv[0] may be relative to a former
// working folder. If its file was removed or replaced since, as by a build: "/proc/self/exe", by
// which this process and its children start the former all the same. `fallback` if /proc is not
// mounted.
std::string ExecutablePath(absl::string_view fallback = "");

// Returns where that file is, or was, to find what lies beside it. Empty if /proc is not mounted.
std::string ExecutableOrigin();

}  // namespace ddp
