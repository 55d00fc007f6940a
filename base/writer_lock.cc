#include "base/writer_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/host_name.h"

namespace ddp {
namespace {

constexpr absl::Duration kPause = absl::Milliseconds(50);
constexpr absl::string_view kNoJob = "none";
constexpr char kOwner[] = "/.job";

std::string PathIn(const std::string& folder) {
  return absl::StrCat(folder, "/", WriterLock::kFile);
}

std::string Describe(const std::string& job) {
  return absl::StrCat("pid ", getpid(), " on host ", HostName(), ", job ", job);
}

// The job in a text of Describe.
absl::string_view JobIn(absl::string_view text) {
  const size_t found = text.rfind(", job ");
  return found == absl::string_view::npos ? "" : text.substr(found + 6);
}

// Replaces the contents. A reader sees at worst a part, and only while the lock is being taken.
absl::Status Write(int fd, const std::string& text, const std::string& path) {
  if (ftruncate(fd, 0) == 0 &&
      pwrite(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size())) {
    return absl::OkStatus();
  }
  return FileError(errno, "writing", path);
}

// Whether `path` names the open file `fd`.
bool IsStill(const std::string& path, int fd) {
  struct stat by_name, opened;
  return stat(path.c_str(), &by_name) == 0 && fstat(fd, &opened) == 0 &&
         by_name.st_dev == opened.st_dev && by_name.st_ino == opened.st_ino;
}

}  // namespace

absl::StatusOr<WriterLock> WriterLock::Take(const std::string& folder,
                                            const WriterLockOptions& options) {
  const std::string path = PathIn(folder);
  const std::string mine = Describe(options.job);
  const absl::Time start = absl::Now();
  bool has_told = false;
  while (true) {
    UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file.ok()) return FileError(errno, "opening", path);
    if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      // The holder before removes the file.
      if (!IsStill(path, file.get())) continue;
      if (absl::Status written = Write(file.get(), absl::StrCat(mine, "\n"), path); !written.ok()) {
        return written;
      }
      return WriterLock(folder, options.job, std::move(file));
    }
    if (errno == EINTR) continue;
    // There are no such locks here.
    if (errno != EWOULDBLOCK) return WriterLock(folder, options.job, UniqueFd());
    const std::string text = ReadFile(path).value_or("");
    const absl::string_view holder = absl::StripAsciiWhitespace(text);
    const bool is_of_one_run = options.job != kNoJob && !options.job_is_shared;
    const bool is_former_life = JobIn(holder) == options.job && (is_of_one_run || options.life > 0);
    const absl::Duration waited = absl::Now() - start;
    const absl::Duration limit = is_former_life ? options.grace : options.patience;
    if (waited >= limit && is_former_life && options.life > 0) {
      return absl::AbortedError(absl::StrCat(
          "is still written by a former life of this job, ", holder, ", after a wait of ",
          absl::FormatDuration(limit), "; this one is ", mine, "; end that process if it hangs"));
    }
    if (waited >= limit) {
      return absl::FailedPreconditionError(
          absl::StrCat("is written by another run, ", holder.empty() ? "which is unknown" : holder,
                       "; this one is ", mine, "; let that run end, or choose another folder"));
    }
    if (is_former_life && waited >= options.patience && !has_told && options.waits) {
      options.waits(holder);
      has_told = true;
    }
    absl::SleepFor(kPause);
  }
}

WriterLock::~WriterLock() {
  if (file_.ok()) unlink(PathIn(folder_).c_str());
}

absl::Status WriterLock::Claim() const {
  if (OwnerOf(folder_) == job_) return absl::OkStatus();
  return WriteFileAtomically(folder_ + kOwner, job_ + "\n");
}

std::string OwnerOf(const std::string& folder) {
  const std::string text = ReadFile(folder + kOwner).value_or("");
  return std::string(absl::StripSuffix(text, "\n"));
}

}  // namespace ddp
