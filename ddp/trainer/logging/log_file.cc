#include "ddp/trainer/logging/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/file.h"
#include "base/status.h"

namespace ddp::trainer::logging {

absl::StatusOr<LogFile> LogFile::Create(const std::string& path) { return Open(path, O_EXCL); }

absl::StatusOr<LogFile> LogFile::Open(const std::string& path, int more_flags) {
  DDP_RETURN_IF_ERROR(MakeDirectories(DirectoryOf(path)));
  // Readable too, for DropTornLine.
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | more_flags, 0666);
  if (fd < 0) return FileError(errno, "opening", path);
  return LogFile(path, fd);
}

LogFile::~LogFile() {
  if (fd_ < 0) return;
  Flush().IgnoreError();
  ::close(fd_);
}

absl::Status LogFile::Flush() {
  size_t written = 0;
  absl::Status status;
  while (written < pending_.size()) {
    const ssize_t n = ::write(fd_, pending_.data() + written, pending_.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      status = FileError(n < 0 ? errno : EIO, "writing", path_);
      break;
    }
    written += static_cast<size_t>(n);
  }
  pending_.erase(0, written);
  return status;
}

absl::Status LogFile::DropTornLine() {
  struct stat info;
  if (::fstat(fd_, &info) != 0) return FileError(errno, "reading", path_);
  off_t end = info.st_size;
  char buffer[4096];
  while (end > 0) {
    const off_t begin = std::max<off_t>(0, end - static_cast<off_t>(sizeof(buffer)));
    const ssize_t n = ::pread(fd_, buffer, static_cast<size_t>(end - begin), begin);
    if (n < 0 && errno == EINTR) continue;
    // 0: another process has truncated it.
    if (n <= 0) return FileError(n < 0 ? errno : EIO, "reading", path_);
    const size_t newline = absl::string_view(buffer, static_cast<size_t>(n)).rfind('\n');
    if (newline != absl::string_view::npos) {
      end = begin + static_cast<off_t>(newline) + 1;
      break;
    }
    end = begin;
  }
  if (end < info.st_size && ::ftruncate(fd_, end) != 0) {
    return FileError(errno, "truncating", path_);
  }
  return absl::OkStatus();
}

}  // namespace ddp::trainer::logging
