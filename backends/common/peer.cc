#include "backends/common/peer.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

// The same number on every architecture; older headers lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ddp::backends {
namespace {

struct ProcessStat {
  char state = '?';
  uint64_t start_ticks = 0;
};

// From /proc/PID/stat: "PID (name) STATE …", start time in field 22. The name may hold anything,
// parentheses and spaces too, so fields count from its last parenthesis. Nothing if the process is
// gone, or /proc is not there.
std::optional<ProcessStat> ReadStat(pid_t pid) {
  const absl::StatusOr<std::string> text = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  if (!text.ok()) return std::nullopt;
  const size_t name_end = text->rfind(')');
  if (name_end == std::string::npos || name_end + 2 > text->size()) return std::nullopt;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(*text).substr(name_end + 2), ' ');
  constexpr size_t kStartTime = 22 - 3;  // the first of `fields` is the 3rd
  ProcessStat stat;
  if (fields.size() <= kStartTime || fields[0].empty() ||
      !absl::SimpleAtoi(fields[kStartTime], &stat.start_ticks)) {
    return std::nullopt;
  }
  stat.state = fields[0][0];
  return stat;
}

bool HasEnded(char state) { return state == 'Z' || state == 'X' || state == 'x'; }

absl::Status Ended(const ProcessIdentity& process) {
  return absl::UnavailableError(absl::StrCat("process ", process.pid, " has ended"));
}

}  // namespace

std::string ToString(const ProcessIdentity& process) {
  return absl::StrCat(process.pid, "@", process.start_ticks);
}

absl::StatusOr<ProcessIdentity> ParseProcessIdentity(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '@');
  ProcessIdentity process;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &process.pid) || process.pid <= 0 ||
      !absl::SimpleAtoi(parts[1], &process.start_ticks)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is no PID@TICKS of a process"));
  }
  return process;
}

ProcessIdentity Peer::Self() {
  const pid_t pid = ::getpid();
  const std::optional<ProcessStat> stat = ReadStat(pid);
  return {pid, stat.has_value() ? stat->start_ticks : 0};
}

absl::StatusOr<Peer> Peer::Open(const ProcessIdentity& process) {
  if (process.pid <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(process.pid, " is no id of a process"));
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  if (!pidfd.ok()) {
    if (errno == ESRCH) return Ended(process);
    if (errno == EMFILE || errno == ENFILE) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "watching process ", process.pid, ": no file descriptor is left: raise `ulimit -n`"));
    }
  }
  // Read after the pidfd was opened: the descriptor refers to the process that had the id before.
  const std::optional<ProcessStat> stat = ReadStat(process.pid);
  if (stat.has_value() && process.start_ticks != 0 && stat->start_ticks != process.start_ticks) {
    return absl::UnavailableError(
        absl::StrCat("process ", process.pid, " has ended, and its id belongs to another now"));
  }
  Peer peer(process, std::move(pidfd));
  if (!peer.Alive()) return Ended(process);
  return peer;
}

bool Peer::Alive() const {
  if (pidfd_.ok()) {
    pollfd watched = {pidfd_.get(), POLLIN, 0};
    return ::poll(&watched, 1, /*timeout=*/0) <= 0;  // readable: ended
  }
  const std::optional<ProcessStat> stat = ReadStat(process_.pid);
  // If it cannot be read, for example without a free descriptor: the id at least exists.
  if (!stat.has_value()) return ::kill(process_.pid, 0) == 0 || errno != ESRCH;
  return !HasEnded(stat->state) &&
         (process_.start_ticks == 0 || stat->start_ticks == process_.start_ticks);
}

}  // namespace ddp::backends
