// An append-only file that buffers in memory until it is flushed.
//
//   DDP_ASSIGN_OR_RETURN(LogFile file, LogFile::Open("run/metrics.jsonl"));
//   file.Append("{}\n");
//   DDP_RETURN_IF_ERROR(file.Flush());
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::trainer::logging {

// Movable; owns its descriptor. Thread-compatible.
class LogFile {
 public:
  // Opens `path` for appending; creates it and its folders if they are missing. Errors are those of
  // base/file.h.
  static absl::StatusOr<LogFile> Open(const std::string& path) { return Open(path, 0); }
  // The same for a new file: AlreadyExists if the name is taken.
  static absl::StatusOr<LogFile> Create(const std::string& path);
  LogFile(LogFile&& other) noexcept
      : path_(std::move(other.path_)),
        fd_(std::exchange(other.fd_, -1)),
        pending_(std::move(other.pending_)) {}
  LogFile& operator=(LogFile&&) = delete;
  // Flushes, ignoring errors, and closes.
  ~LogFile();

  void Append(absl::string_view bytes) { pending_.append(bytes.data(), bytes.size()); }

  // Writes pending bytes; does not fsync. After an error the bytes that were not written are still
  // pending, and a later Flush continues there. ResourceExhausted if the disk is full.
  absl::Status Flush();

  // Truncates the file after its last newline: removes a line that a killed writer left unfinished.
  absl::Status DropTornLine();

  size_t pending() const { return pending_.size(); }  // bytes
  const std::string& path() const { return path_; }

 private:
  static absl::StatusOr<LogFile> Open(const std::string& path, int more_flags);
  LogFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
  std::string pending_;
};

}  // namespace ddp::trainer::logging
