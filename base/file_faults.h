// For tests: a FileSystem whose Nth call fails or kills the process.
//
//   FaultyFileSystem files({.call = "fsync", .nth = 1, .error = EIO});
//   EXPECT_FALSE(WriteFileAtomically(path, "new", &files).ok());
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/file.h"

namespace ddp {

struct Fault {
  // "open", "write", "fsync", "close", "rename", "exchange", "unlink", "mkdir", "rmdir"; empty:
  // any.
  std::string call = {};
  int64_t nth = 0;  // counts from 1 among the calls of that name; 0: never
  int error = 0;    // errno to fail with; 0: SIGKILL to this process instead of the call
};

// Records all calls, with or without a fault. Not thread-safe.
class FaultyFileSystem : public FileSystem {
 public:
  explicit FaultyFileSystem(Fault fault = {}) : fault_(std::move(fault)) {}

  // Names of the calls made, in order.
  const std::vector<std::string>& calls() const { return calls_; }

  // Short writes: each write call takes at most this many bytes.
  void set_max_write(size_t bytes) { max_write_ = bytes; }

  int Open(const char* path, int flags, mode_t mode) override {
    return InjectFault("open") ? -1 : FileSystem::Open(path, flags, mode);
  }
  ssize_t Write(int fd, const void* data, size_t size) override {
    return InjectFault("write") ? -1 : FileSystem::Write(fd, data, std::min(size, max_write_));
  }
  int Fsync(int fd) override { return InjectFault("fsync") ? -1 : FileSystem::Fsync(fd); }
  int Close(int fd) override {
    // close(2) frees the descriptor even where it reports an error.
    const bool fails = InjectFault("close");
    const int result = FileSystem::Close(fd);
    if (!fails) return result;
    errno = fault_.error;
    return -1;
  }
  int Rename(const char* from, const char* to) override {
    return InjectFault("rename") ? -1 : FileSystem::Rename(from, to);
  }
  int Exchange(const char* a, const char* b) override {
    return InjectFault("exchange") ? -1 : FileSystem::Exchange(a, b);
  }
  int Unlink(const char* path) override {
    return InjectFault("unlink") ? -1 : FileSystem::Unlink(path);
  }
  int Mkdir(const char* path, mode_t mode) override {
    return InjectFault("mkdir") ? -1 : FileSystem::Mkdir(path, mode);
  }
  int Rmdir(const char* path) override {
    return InjectFault("rmdir") ? -1 : FileSystem::Rmdir(path);
  }

 private:
  bool InjectFault(absl::string_view call) {
    calls_.emplace_back(call);
    if (!fault_.call.empty() && fault_.call != call) return false;
    if (++matched_ != fault_.nth) return false;
    if (fault_.error == 0) ::kill(::getpid(), SIGKILL);
    errno = fault_.error;
    return true;
  }

  Fault fault_;
  int64_t matched_ = 0;
  size_t max_write_ = std::numeric_limits<size_t>::max();
  std::vector<std::string> calls_;
};

}  // namespace ddp
