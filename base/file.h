// Files as a training job needs them: replaced as a whole or not at all, durable once written, and
// with errors that name the path. Every call that changes the disk goes through `FileSystem`, so
// that a test can make any one of them fail.
//
//   DDP_RETURN_IF_ERROR(WriteFileAtomically("/runs/a/status.json", text));
//   DDP_ASSIGN_OR_RETURN(std::string text, ReadFile("/runs/a/status.json"));
//
// Codes of all functions: NotFound (no such file), PermissionDenied, ResourceExhausted (disk or
// quota full), FailedPrecondition (read-only disk, a file where a folder should be), and what
// absl::ErrnoToStatus makes of the rest. Functions are thread-safe.
#pragma once

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

// The system calls that change the disk, each with the system call's own contract (-1 and errno).
// The base class makes them; a test overrides them. Thread safety: that of the override.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // The real one. Stateless and immortal.
  static FileSystem* Default();

  virtual int Open(const char* path, int flags, mode_t mode);
  virtual ssize_t Write(int fd, const void* data, size_t size);
  virtual int Fsync(int fd);
  virtual int Close(int fd);
  virtual int Rename(const char* from, const char* to);
  // renameat2 with RENAME_EXCHANGE: each name then has what the other had, in one step.
  virtual int Exchange(const char* a, const char* b);
  virtual int Unlink(const char* path);
  virtual int Mkdir(const char* path, mode_t mode);
};

// "WHAT PATH: strerror"; a full disk is called that.
absl::Status FileError(int error, absl::string_view what, absl::string_view path);

// The whole file.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Makes `path` and the folders above it; OK if it is there.
absl::Status MakeDirectories(const std::string& path, FileSystem* files = FileSystem::Default());

// Makes a file in `directory`, writes to it and removes it: OK means that writing works now.
absl::Status ProveWritable(const std::string& directory, FileSystem* files = FileSystem::Default());

// Names in `directory`, sorted, without "." and "..".
absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& directory);

// Removes a file, or a folder with all in it; OK if nothing is there.
absl::Status RemoveTree(const std::string& path, FileSystem* files = FileSystem::Default());

// Makes the entries of a folder (a rename, a new file) durable.
absl::Status SyncDirectory(const std::string& directory, FileSystem* files = FileSystem::Default());

// The folder that holds `path`; "." for a bare name.
std::string DirectoryOf(const std::string& path);

// A fresh name in the folder of `path`: hidden (".NAME.tmp-" and 16 random hexadecimal digits), so
// that listings and patterns pass it over.
std::string TemporaryName(const std::string& path);

// True for the last component of what TemporaryName makes.
bool IsTemporaryName(absl::string_view name);

// Calls `write` with a temporary name, which it makes into a durable file or folder, then renames
// that to `path` and syncs the folder. A reader of `path` sees the old or the new, never a part.
// If `write` or the rename fails, the temporary is removed and `path` is as it was. If only the
// last sync fails, the new file is in place, and not yet certain to outlive a power failure.
absl::Status ReplaceAtomically(const std::string& path,
                               absl::FunctionRef<absl::Status(const std::string& temporary)> write,
                               FileSystem* files = FileSystem::Default());

// ReplaceAtomically with these bytes.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents,
                                 FileSystem* files = FileSystem::Default());

// A file that is written from start to end. Movable; owns its descriptor. Thread-compatible.
class FileWriter {
 public:
  // A new file. AlreadyExists if the name is taken.
  static absl::StatusOr<FileWriter> Create(const std::string& path,
                                           FileSystem* files = FileSystem::Default());
  FileWriter(FileWriter&& other) noexcept
      : path_(std::move(other.path_)),
        files_(other.files_),
        fd_(std::exchange(other.fd_, -1)),
        size_(other.size_) {}
  FileWriter& operator=(FileWriter&&) = delete;
  // Closes; what was not finished has no promise of durability.
  ~FileWriter();

  // All of it, or an error.
  absl::Status Append(const void* data, size_t size);
  absl::Status Append(absl::string_view text) { return Append(text.data(), text.size()); }

  // fsync and close. No Append afterwards.
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

// A regular file that is read at any place. Movable; owns its descriptor. ReadAt is thread-safe.
class FileReader {
 public:
  // FailedPrecondition if it is no regular file.
  static absl::StatusOr<FileReader> Open(const std::string& path);
  FileReader(FileReader&& other) noexcept
      : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}
  FileReader& operator=(FileReader&&) = delete;
  ~FileReader();

  // Exactly `size` bytes from `offset`. OutOfRange if the file ends before.
  absl::Status ReadAt(uint64_t offset, void* data, size_t size) const;

  // Bytes, when it was opened.
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  FileReader(std::string path, int fd, uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  std::string path_;
  int fd_;
  uint64_t size_;
};

// An advisory lock (flock) on a folder, held until destruction or the end of the process, however
// it ends. Writers share it; whoever wants to clean up takes it alone. Movable.
class DirectoryLock {
 public:
  // Waits while another process holds it exclusively.
  static absl::StatusOr<DirectoryLock> Shared(const std::string& directory);
  // Unavailable at once if anybody holds it; Unimplemented or the like where the file system has
  // no such locks (NFS has none for folders).
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
