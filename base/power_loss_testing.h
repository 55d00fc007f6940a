// For tests: what may be on disk after a loss of power, computed from the system calls that were
// made.
//
//   const Tree before = ReadTree(folder);
//   RecordingFileSystem files(folder);
//   Save(folder, &files);
//   for (size_t calls = 0; calls <= files.trace().size(); ++calls) {
//     WriteTree(AfterPowerLoss(before, files.trace(), calls, {.kept = Kept::kNothing}), fresh);
//     … // what `fresh` holds must be the old or the new
//   }
//
// What POSIX promises, and no more: the contents of a file are durable after fsync of the file, its
// name after fsync of the folder that holds it. Whatever is not may be on disk or not, in any
// combination and order; of writes also a part, with zeros where a gap is. A rename within a folder
// is atomic. (leveldb's FaultInjectionTestEnv drops everything that is not durable; ALICE and
// CrashMonkey show that what breaks programs is often a subset.)
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"

namespace ddp {

// A folder's contents: path below it -> bytes of a file; nullopt: a folder.
using Tree = std::map<std::string, std::optional<std::string>>;

Tree ReadTree(const std::string& folder);

// Makes `folder` anew with these contents.
void WriteTree(const Tree& tree, const std::string& folder);

struct TracedCall {
  enum class Kind { kOpen, kWrite, kFsync, kRename, kExchange, kUnlink, kMkdir, kRmdir };
  Kind kind;
  std::string path = {};   // below the folder; "": the folder itself
  std::string other = {};  // of a rename: the new name
  int64_t handle = 0;      // of an open file: differs from that of every other
  bool creates = false;
  std::string data = {};
};

// Makes all calls, and records those that succeed below `folder`. Thread-safe: the order is that in
// which the calls were made.
class RecordingFileSystem : public FileSystem {
 public:
  // Says of the `ignored_fsync`th fsync (from 1) that it succeeded without making it; 0: of none.
  explicit RecordingFileSystem(std::string folder, int64_t ignored_fsync = 0)
      : folder_(std::move(folder)), ignored_fsync_(ignored_fsync) {}

  // Must not be called while calls are made.
  const std::vector<TracedCall>& trace() const { return trace_; }
  int64_t fsyncs() const { return fsyncs_; }

  int Open(const char* path, int flags, mode_t mode) override;
  ssize_t Write(int fd, const void* data, size_t size) override;
  int Fsync(int fd) override;
  int Close(int fd) override;
  int Rename(const char* from, const char* to) override;
  int Exchange(const char* a, const char* b) override;
  int Unlink(const char* path) override;
  int Mkdir(const char* path, mode_t mode) override;
  int Rmdir(const char* path) override;

 private:
  std::optional<std::string> Below(const char* path) const;
  void Record(TracedCall::Kind kind, const char* path);

  const std::string folder_;
  const int64_t ignored_fsync_;
  std::mutex mutex_;
  std::map<int, int64_t> handles_;  // of open files, by descriptor
  int64_t next_handle_ = 1;
  int64_t fsyncs_ = 0;
  std::vector<TracedCall> trace_;
};

enum class Kept { kNothing, kEverything, kSome };

struct Unsynced {
  Kept kept = Kept::kNothing;  // of what is not durable
  uint32_t seed = 0;           // kSome: chooses a subset
};

// The contents of the folder, in which everything of `before` was durable, after the first `calls`
// of the trace and a loss of power.
Tree AfterPowerLoss(const Tree& before, const std::vector<TracedCall>& trace, size_t calls,
                    const Unsynced& unsynced);

}  // namespace ddp
