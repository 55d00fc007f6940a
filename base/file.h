// File operations of a training job: atomic replacement, fsync, errors that name the path. System
// calls that change the disk go through `FileSystem`, so that tests can make any of them fail.
//
//   DDP_RETURN_IF_ERROR(WriteFileAtomically("/runs/a/status.json", text));
//   DDP_ASSIGN_OR_RETURN(std::string text, ReadFile("/runs/a/status.json"));
//
// Status codes are those of absl::ErrnoToStatus: NotFound (no such file), PermissionDenied,
// ResourceExhausted (disk or quota full), FailedPrecondition (read-only file system, a file where a
// folder is needed), and so on. Functions are thread-safe.
#pragma once

#include <sys/statvfs.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp {

// The system calls that change the disk, and the one that asks for its free space, with their usual
// contract (-1 and errno). The base class
// calls the kernel and is thread-safe; tests override it.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // The real file system. Stateless; never destroyed.
  static FileSystem* Default();

  virtual int Open(const char* path, int flags, mode_t mode);
  virtual ssize_t Write(int fd, const void* data, size_t size);
  virtual int Fsync(int fd);
  virtual int Close(int fd);
  virtual int Rename(const char* from, const char* to);
  // renameat2 with RENAME_EXCHANGE: swaps two paths atomically.
  virtual int Exchange(const char* a, const char* b);
  virtual int Unlink(const char* path);
  virtual int Mkdir(const char* path, mode_t mode);
  virtual int Rmdir(const char* path);
  virtual int Statvfs(const char* path, struct statvfs* info);
};

// The status of errno `error`, with message "WHAT PATH: strerror", prefixed with "disk full" for
// ENOSPC and EDQUOT; with the shell's limit that is met (EFBIG, EMFILE).
absl::Status FileError(int error, absl::string_view what, absl::string_view path);

// Reads a whole file.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Creates `path` and its parent folders; OK if it exists.
absl::Status MakeDirectories(const std::string& path, FileSystem* files = FileSystem::Default());

// Creates, writes and removes a file in `directory`, to find out whether writing works.
absl::Status ProveWritable(const std::string& directory, FileSystem* files = FileSystem::Default());

// Names of the entries of `directory`, sorted, without "." and "..".
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& directory);

// Removes a file, or a folder with its contents; OK if `path` does not exist.
absl::Status RemoveTree(const std::string& path, FileSystem* files = FileSystem::Default());

// fsyncs a folder: makes renames and new files in it durable.
absl::Status SyncDirectory(const std::string& directory, FileSystem* files = FileSystem::Default());

// The folder that holds `path`; "." for a bare name.
std::string DirectoryOf(const std::string& path);

// A new, hidden name in the folder of `path`: ".NAME.tmp-" and 16 random hexadecimal digits.
std::string TemporaryName(const std::string& path);

// Whether `name`, a last path component, may have come from TemporaryName.
bool IsTemporaryName(absl::string_view name);

// Calls `write` with a temporary name, at which it must create a durable file or folder; then
// renames that to `path` and fsyncs the containing folder. Readers of `path` see either the old or
// the new contents. If `write` or the rename fails, the temporary is removed and `path` is
// unchanged. If only the last fsync fails, the new file is in place but may not survive a power
// failure.
absl::Status ReplaceAtomically(const std::string& path,
                               absl::FunctionRef<absl::Status(const std::string& temporary)> write,
                               FileSystem* files = FileSystem::Default());

// ReplaceAtomically, for a file with these bytes.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents,
                                 FileSystem* files = FileSystem::Default());

// A new file, written sequentially. Movable; owns its descriptor. Thread-compatible.
class FileWriter {
 public:
  // AlreadyExists if `path` exists. `mode` is subject to the umask: 0777 for a program.
  static absl::StatusOr<FileWriter> Create(const std::string& path,
                                           FileSystem* files = FileSystem::Default(),
                                           mode_t mode = 0666);
  FileWriter(FileWriter&& other) noexcept
      : path_(std::move(other.path_)),
        files_(other.files_),
        fd_(std::exchange(other.fd_, -1)),
        size_(other.size_) {}
  FileWriter& operator=(FileWriter&&) = delete;
  // Closes the file. Without Finish its contents may not be durable.
  ~FileWriter();

  // Writes all bytes, or returns an error.
  absl::Status Append(const void* data, size_t size);
  absl::Status Append(absl::string_view text) { return Append(text.data(), text.size()); }

  // Calls fsync and close. Append must not be called afterwards.
  absl::Status Finish();

  // Bytes appended so far.
  uint64_t size() const { return size_; }

 private:
  FileWriter(std::string path, FileSystem* files, int fd)
      : path_(std::move(path)), files_(files), fd_(fd) {}

  std::string path_;
  FileSystem* files_;
  int fd_;
  uint64_t size_ = 0;
};

// A regular file, for random access. Movable; owns its descriptor. ReadAt is thread-safe.
class FileReader {
 public:
  // FailedPrecondition if `path` is not a regular file.
  static absl::StatusOr<FileReader> Open(const std::string& path);
  FileReader(FileReader&& other) noexcept
      : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
  FileReader& operator=(FileReader&&) = delete;
  ~FileReader();

  // Reads exactly `size` bytes at `offset`. OutOfRange if the file is too short.
  absl::Status ReadAt(uint64_t offset, void* data, size_t size) const;
  // Asks the system to read these bytes in the background, for a ReadAt that comes soon: else it
  // reads some 100 KiB ahead, and the disk waits while the program checks what it has.
  void ReadAhead(uint64_t offset, size_t size) const;

  // Size in bytes when the file was opened.
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  FileReader(std::string path, int fd, uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  std::string path_;
  int fd_;
  uint64_t size_;
};

// An advisory lock (flock) on a folder, released by the destructor or by the end of the process.
// Writers hold it shared; clean-up takes it exclusively. Movable.
class DirectoryLock {
 public:
  // Waits while another process holds it exclusively.
  static absl::StatusOr<DirectoryLock> Shared(const std::string& directory);
  // Does not wait: Unavailable if any process holds it. Another error if the file system does not
  // support such locks (NFS does not for folders).
  static absl::StatusOr<DirectoryLock> TryExclusive(const std::string& directory);
  DirectoryLock(DirectoryLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock();

 private:
  static absl::StatusOr<DirectoryLock> Take(const std::string& directory, int operation);
  explicit DirectoryLock(int fd) : fd_(fd) {}

  int fd_;
};

}  // namespace ddp
