// RAII for a file descriptor.
//
//   UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
//   if (!fd.ok()) return absl::ErrnoToStatus(errno, path);
#pragma once

#include <unistd.h>

#include <utility>

namespace ddp {

// Movable; owns the descriptor, or none (-1). Thread-compatible.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    UniqueFd old(std::exchange(fd_, other.Release()));
    return *this;
  }
  ~UniqueFd() { Close(); }

  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }
  // Passes ownership to the caller.
  int Release() { return std::exchange(fd_, -1); }
  void Close() {
    if (fd_ >= 0) ::close(Release());
  }

 private:
  int fd_ = -1;
};

}  // namespace ddp
