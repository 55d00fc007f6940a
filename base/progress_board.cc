#include "base/progress_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "base/status.h"

namespace ddp {

// As a new file of memory has it: all bytes are 0.
struct ProgressBoard::Shared {
  // Tells this memory from another descriptor of the same number; set by Create.
  static constexpr uint64_t kMagic = 0x6464705f70726f67;
  static constexpr size_t kLongestPath = 4096;

  uint64_t magic;
  std::atomic<bool> has_begun;
  std::atomic<int64_t> begun_at;
  std::atomic<int64_t> step;
  char earlier_checkpoint[kLongestPath];
};

ProgressBoard::ProgressBoard(UniqueFd fd, Shared* shared) : fd_(std::move(fd)), shared_(shared) {}

ProgressBoard::ProgressBoard(ProgressBoard&& other) noexcept
    : fd_(std::move(other.fd_)), shared_(std::exchange(other.shared_, nullptr)) {}

ProgressBoard& ProgressBoard::operator=(ProgressBoard&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(shared_, other.shared_);
  return *this;
}

ProgressBoard::~ProgressBoard() {
  if (shared_ != nullptr) munmap(shared_, sizeof(Shared));
}

absl::StatusOr<ProgressBoard> ProgressBoard::Map(UniqueFd fd) {
  static_assert(std::atomic<int64_t>::is_always_lock_free);
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map shared memory");
  return ProgressBoard(std::move(fd), static_cast<Shared*>(memory));
}

absl::StatusOr<ProgressBoard> ProgressBoard::Create() {
  UniqueFd fd(memfd_create("ddp_progress", MFD_CLOEXEC));
  if (!fd.ok() || ftruncate(fd.get(), sizeof(Shared)) != 0) {
    return absl::ErrnoToStatus(errno, "cannot make shared memory");
  }
  DDP_ASSIGN_OR_RETURN(ProgressBoard board, Map(std::move(fd)));
  board.shared_->magic = Shared::kMagic;
  return board;
}

std::optional<ProgressBoard> ProgressBoard::FromEnvironment(const Environment& env) {
  if (!env.Has(kVariable)) return std::nullopt;
  const absl::StatusOr<int64_t> number = env.GetInt(kVariable, 0, 1 << 20);
  struct stat info;
  if (!number.ok() || fstat(static_cast<int>(*number), &info) != 0 ||
      info.st_size != static_cast<off_t>(sizeof(Shared))) {
    return std::nullopt;
  }
  // A duplicate: the descriptor may be the caller's.
  absl::StatusOr<ProgressBoard> board =
      Map(UniqueFd(fcntl(static_cast<int>(*number), F_DUPFD_CLOEXEC, 0)));
  if (!board.ok() || board->shared_->magic != Shared::kMagic) return std::nullopt;
  fcntl(static_cast<int>(*number), F_SETFD, FD_CLOEXEC);
  return *std::move(board);
}

void ProgressBoard::Begin(int64_t step, absl::string_view earlier_checkpoint) {
  const size_t size = earlier_checkpoint.size() < Shared::kLongestPath ? earlier_checkpoint.size()
                                                                       : 0;  // half a path is none
  std::memcpy(shared_->earlier_checkpoint, earlier_checkpoint.data(), size);
  shared_->earlier_checkpoint[size] = '\0';
  shared_->begun_at = step;
  shared_->step = step;
  shared_->has_begun = true;
}

void ProgressBoard::Reached(int64_t step) { shared_->step.store(step, std::memory_order_relaxed); }

std::optional<Progress> ProgressBoard::Read() const {
  if (!shared_->has_begun) return std::nullopt;
  const char* path = shared_->earlier_checkpoint;
  return Progress{.begun_at = shared_->begun_at,
                  .step = shared_->step,
                  .earlier_checkpoint = std::string(path, strnlen(path, Shared::kLongestPath))};
}

void ProgressBoard::Clear() { shared_->has_begun = false; }

}  // namespace ddp
