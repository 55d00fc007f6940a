#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/populate_pages.h"
#include "base/status.h"

namespace ddp {
namespace {

// Linux moves at most 0x7ffff000 bytes a call; smaller pieces also keep a kill prompt.
constexpr size_t kMaxTransfer = size_t{1} << 26;
constexpr absl::string_view kTemporaryMark = ".tmp-";
constexpr size_t kTemporaryDigits = 16;

}  // namespace

FileSystem* FileSystem::Default() {
  static auto* files = new FileSystem();
  return files;
}

int FileSystem::Open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
ssize_t FileSystem::Write(int fd, const void* data, size_t size) { return ::write(fd, data, size); }
int FileSystem::Fsync(int fd) { return ::fsync(fd); }
int FileSystem::Close(int fd) { return ::close(fd); }
int FileSystem::Rename(const char* from, const char* to) { return ::rename(from, to); }
int FileSystem::Exchange(const char* a, const char* b) {
  return ::renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
}
int FileSystem::Unlink(const char* path) { return ::unlink(path); }
int FileSystem::Mkdir(const char* path, mode_t mode) { return ::mkdir(path, mode); }
int FileSystem::Rmdir(const char* path) { return ::rmdir(path); }
int FileSystem::Statvfs(const char* path, struct statvfs* info) { return ::statvfs(path, info); }

absl::Status FileError(int error, absl::string_view what, absl::string_view path) {
  const bool full = error == ENOSPC || error == EDQUOT;
  const absl::string_view limit = error == EFBIG ? " (limit on the size of files: `ulimit -f`)"
                                  : error == EMFILE || error == ENFILE
                                      ? " (limit on open files: `ulimit -n`)"
                                      : "";
  return absl::ErrnoToStatus(error, absl::StrCat(full ? "disk full " : "", what, " ", path, limit));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, "opening", path);
  absl::Cleanup close = [fd] { ::close(fd); };
  std::string contents;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = ::read(fd, buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, "reading", path);
    if (n == 0) return contents;
    contents.append(buffer, static_cast<size_t>(n));
  }
}

absl::Status MakeDirectories(const std::string& path, FileSystem* files) {
  // One prefix at a time: another rank may create the same folders concurrently.
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string prefix = path.substr(0, end);
    if (files->Mkdir(prefix.c_str(), 0777) != 0) {
      const int error = errno;
      struct stat info;
      const bool is_folder = ::stat(prefix.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
      if (!is_folder) {
        return FileError(error == EEXIST ? ENOTDIR : error, "making folder", prefix);
      }
    }
    if (end == std::string::npos) return absl::OkStatus();
  }
}

absl::Status ProveWritable(const std::string& directory, FileSystem* files) {
  const std::string path = TemporaryName(absl::StrCat(directory, "/writable"));
  absl::StatusOr<FileWriter> writer = FileWriter::Create(path, files);
  absl::Status status = writer.status();
  if (status.ok()) {
    status = writer->Append("x");
    // Another process may have removed it, as what was left behind.
    if (files->Unlink(path.c_str()) != 0 && errno != ENOENT && status.ok()) {
      status = FileError(errno, "removing", path);
    }
  }
  return Annotate(status, absl::StrCat("cannot write in folder ", directory));
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& directory) {
  std::error_code error;
  std::vector<std::string> names;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) return FileError(error.value(), "listing folder", directory);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status RemoveTree(const std::string& path, FileSystem* files) {
  if (files->Unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return FileError(errno, "removing", path);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(path);
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(names.status());
  for (const std::string& name : *names) {
    DDP_RETURN_IF_ERROR(RemoveTree(absl::StrCat(path, "/", name), files));
  }
  if (files->Rmdir(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return FileError(errno, "removing", path);
}

absl::Status SyncDirectory(const std::string& directory, FileSystem* files) {
  const int fd = files->Open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return FileError(errno, "opening folder", directory);
  // EINVAL: this file system does not sync folders.
  const int error = files->Fsync(fd) != 0 && errno != EINVAL ? errno : 0;
  files->Close(fd);
  return error != 0 ? FileError(error, "syncing folder", directory) : absl::OkStatus();
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string TemporaryName(const std::string& path) {
  const size_t slash = path.rfind('/');
  const size_t name = slash == std::string::npos ? 0 : slash + 1;
  std::random_device random;  // getrandom(2): differs between ranks and after fork
  const uint64_t unique = (static_cast<uint64_t>(random()) << 32) | random();
  return absl::StrCat(path.substr(0, name), ".", path.substr(name), kTemporaryMark,
                      absl::Hex(unique, absl::kZeroPad16));
}

bool IsTemporaryName(absl::string_view name) {
  const size_t mark = name.rfind(kTemporaryMark);
  if (mark == absl::string_view::npos || mark < 2 || name[0] != '.') return false;
  const absl::string_view digits = name.substr(mark + kTemporaryMark.size());
  return digits.size() == kTemporaryDigits &&
         std::all_of(digits.begin(), digits.end(), [](unsigned char c) {
           return absl::ascii_isxdigit(c) && !absl::ascii_isupper(c);
         });
}

absl::Status ReplaceAtomically(const std::string& path,
                               absl::FunctionRef<absl::Status(const std::string& temporary)> write,
                               FileSystem* files) {
  const std::string temporary = TemporaryName(path);
  absl::Status status = write(temporary);
  if (status.ok() && files->Rename(temporary.c_str(), path.c_str()) != 0) {
    status = FileError(errno, absl::StrCat("renaming ", temporary, " to"), path);
  }
  if (!status.ok()) {
    // Return the first error. A remainder is hidden and is cleaned up later.
    RemoveTree(temporary, files).IgnoreError();
    return status;
  }
  return SyncDirectory(DirectoryOf(path), files);
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents,
                                 FileSystem* files) {
  return ReplaceAtomically(
      path,
      [&](const std::string& temporary) -> absl::Status {
        DDP_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(temporary, files));
        DDP_RETURN_IF_ERROR(writer.Append(contents));
        return writer.Finish();
      },
      files);
}

absl::StatusOr<FileWriter> FileWriter::Create(const std::string& path, FileSystem* files,
                                              mode_t mode) {
  const int fd = files->Open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) return FileError(errno, "creating", path);
  return FileWriter(path, files, fd);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) files_->Close(fd_);
}

absl::Status FileWriter::Append(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = files_->Write(fd_, next, std::min(size, kMaxTransfer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, "writing", path_);
    if (n == 0) return FileError(EIO, "writing", path_);
    next += n;
    size -= static_cast<size_t>(n);
    size_ += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status FileWriter::Finish() {
  // No retry: after a failed fsync the kernel may have dropped the dirty pages.
  const int sync_error = files_->Fsync(fd_) != 0 ? errno : 0;
  const int close_error = files_->Close(std::exchange(fd_, -1)) != 0 ? errno : 0;
  if (sync_error != 0) return FileError(sync_error, "syncing", path_);
  if (close_error != 0 && close_error != EINTR) return FileError(close_error, "closing", path_);
  return absl::OkStatus();
}

absl::StatusOr<FileReader> FileReader::Open(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, "opening", path);
  FileReader reader(path, fd, 0);
  struct stat info;
  if (::fstat(fd, &info) != 0) return FileError(errno, "reading", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is no regular file"));
  }
  reader.size_ = static_cast<uint64_t>(info.st_size);
  return reader;
}

FileReader::~FileReader() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status FileReader::ReadAt(uint64_t offset, void* data, size_t size) const {
  constexpr size_t kLarge = 1 << 20;
  if (size >= kLarge) PopulatePages(data, size);
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = ::pread(fd_, next, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(errno, "reading", path_);
    if (n == 0) return absl::OutOfRangeError(absl::StrCat(path_, " ends at byte ", offset));
    next += n;
    offset += static_cast<uint64_t>(n);
    size -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

void FileReader::ReadAhead(uint64_t offset, size_t size) const {
  // Linux takes no more than its own read-ahead at a time.
  constexpr size_t kStep = 128 << 10;
  for (size_t at = 0; at < size; at += kStep) {
    (void)::posix_fadvise(fd_, static_cast<off_t>(offset + at),
                          static_cast<off_t>(std::min(kStep, size - at)), POSIX_FADV_WILLNEED);
  }
}

absl::StatusOr<DirectoryLock> DirectoryLock::Take(const std::string& directory, int operation) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileError(errno, "opening folder", directory);
  DirectoryLock lock(fd);
  while (::flock(fd, operation) != 0) {
    if (errno != EINTR) return FileError(errno, "locking folder", directory);
  }
  return lock;
}

absl::StatusOr<DirectoryLock> DirectoryLock::Shared(const std::string& directory) {
  return Take(directory, LOCK_SH);
}

absl::StatusOr<DirectoryLock> DirectoryLock::TryExclusive(const std::string& directory) {
  return Take(directory, LOCK_EX | LOCK_NB);
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace ddp
