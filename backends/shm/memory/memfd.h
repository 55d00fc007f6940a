// Memory that several processes map, without a name in any file system: gone with its last user,
// however that ends.
//
//   DDP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Create(size_t{64} << 30));  // sparse
//   DDP_RETURN_IF_ERROR(memory.Reserve(0, 1 << 20));  // the first MiB is safe to touch
//   std::memset(memory.data(), 1, 1 << 20);
//   // Elsewhere, with the descriptor that came by fd_passing.h:
//   DDP_ASSIGN_OR_RETURN(SharedMemory same, SharedMemory::Map(fd));
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::backends::shm {

// A memfd and its mapping. Its size is sealed: nobody can shrink it under a reader, which would be
// a SIGBUS. Address space is taken at once, memory page by page, when reserved or first touched; a
// fresh page reads as zeros. The descriptor is close-on-exec; a child made by fork alone keeps the
// memory alive as long as it lives.
//
// Movable; owns descriptor and mapping. Thread-compatible; Reserve and Release of different ranges
// may run in several threads and processes at once.
class SharedMemory {
 public:
  // Empty: data() is null, size() is 0.
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // A new one, `bytes` (more than 0) rounded up to pages. Takes no memory yet.
  // ResourceExhausted where a limit (RLIMIT_FSIZE, RLIMIT_AS, descriptors) is too low, naming it;
  // FailedPrecondition where the kernel or a seccomp filter has no memfd.
  static absl::StatusOr<SharedMemory> Create(size_t bytes);

  // Another process's. Takes ownership of `fd`, also on failure. InvalidArgument for a descriptor
  // whose size is not sealed; otherwise as Create.
  static absl::StatusOr<SharedMemory> Map(int fd);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // bytes, whole pages
  int fd() const { return fd_.get(); }   // stays owned by this object

  // Takes memory for [offset, offset + bytes), rounded outward to pages, so that touching it cannot
  // fail: a page that cannot be had on first touch is a SIGBUS, or the kernel's OOM killer. What is
  // there stays as it is. About 0.3 s per GiB that is new, in the calling thread; asks the memory
  // limits again as it goes, since others take memory at the same time.
  // ResourceExhausted says how much there is, which limit holds and what to raise; a part of the
  // range may then be reserved. OutOfRange outside [0, size()).
  absl::Status Reserve(size_t offset, size_t bytes);

  // Gives memory back: the whole pages inside [offset, offset + bytes) read as zeros again, in
  // every process. OutOfRange as Reserve.
  absl::Status Release(size_t offset, size_t bytes);

 private:
  SharedMemory(UniqueFd fd, std::byte* data, size_t size)
      : fd_(std::move(fd)), data_(data), size_(size) {}
  static absl::StatusOr<SharedMemory> MapSealed(UniqueFd fd, size_t size);
  absl::Status CheckRange(size_t offset, size_t bytes) const;

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ddp::backends::shm
