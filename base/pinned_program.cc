#include "base/pinned_program.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/process.h"

namespace ddp {
namespace {

bool IsScript(int fd) {
  char start[2] = {};
  return pread(fd, start, sizeof(start), 0) == sizeof(start) && start[0] == '#' && start[1] == '!';
}

}  // namespace

absl::StatusOr<PinnedProgram> PinnedProgram::Open(const std::string& path) {
  if (!absl::StrContains(path, "/")) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is no path"));
  }
  // This process may have started before a build that has ended by now.
  const bool is_own = path == ExecutablePath() || path == ExecutableOrigin();
  UniqueFd fd(open(is_own ? "/proc/self/exe" : path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return FileError(errno, "opening", path);
  return PinnedProgram(path, std::move(fd));
}

std::string PinnedProgram::Path() const {
  struct stat pinned = {}, there = {};
  const bool same = fstat(fd_.get(), &pinned) == 0 && stat(path_.c_str(), &there) == 0 &&
                    pinned.st_dev == there.st_dev && pinned.st_ino == there.st_ino;
  return same || IsScript(fd_.get()) ? path_ : absl::StrCat("/proc/self/fd/", fd_.get());
}

}  // namespace ddp
