// Starting one rank so that it cannot outlive us.
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
#include "base/unique_fd.h"

namespace ddp::launchers {

// The process group of one job, led by a watchdog: a small process of ours that does nothing but
// wait for this process to end, however it ends, and then kills the group. Linux's own death signal
// reaches only the ranks; the group includes what ranks have started. Thread-compatible.
class PosixProcessGroup {
 public:
  static absl::StatusOr<PosixProcessGroup> Create();
  PosixProcessGroup(PosixProcessGroup&& other) noexcept;
  PosixProcessGroup& operator=(PosixProcessGroup&&) = delete;
  // Kills whoever is left in the group with SIGKILL, and reaps the watchdog.
  ~PosixProcessGroup();

  pid_t id() const { return watchdog_; }

  // To all members; the watchdog itself heeds SIGKILL only.
  void Signal(int signal) const;

 private:
  PosixProcessGroup(pid_t watchdog, UniqueFd lifeline);

  pid_t watchdog_;
  UniqueFd lifeline_;  // the watchdog reads the other end: end of file when we are gone
};

struct ProcessOptions {
  std::vector<std::string> argv;  // the program, looked up in PATH if it has no slash; arguments
  std::map<std::string, std::string> environment;  // all of it
  pid_t group = 0;                                 // joins this process group
  int stdin_fd = 0;                                // these three become 0, 1, 2
  int stdout_fd = 1;
  int stderr_fd = 2;
  std::optional<int> inherited_fd;  // stays open under its number
};

// Starts a process that is killed when the calling thread ends (Linux ties the death signal to the
// thread), so call it from one that waits for the process. The caller reaps it. NotFound,
// PermissionDenied and so on, naming the program, if it cannot be executed.
absl::StatusOr<pid_t> StartProcess(const ProcessOptions& options);

}  // namespace ddp::launchers
