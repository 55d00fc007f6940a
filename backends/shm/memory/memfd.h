// Memory that several processes map (a memfd). It has no name in any file system; the kernel frees
// it when the last process that uses it has ended, in whatever way.
//
//   DDP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Create(size_t{64} << 30));  // sparse
//   DDP_RETURN_IF_ERROR(memory.Reserve(0, 1 << 20));  // the first MiB is safe to touch
//   std::memset(memory.data(), 1, 1 << 20);
//   // In another process, with the descriptor received through fd_passing.h:
//   DDP_ASSIGN_OR_RETURN(SharedMemory same, SharedMemory::Map(fd));
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::backends::shm {

// A memfd and its mapping. The size is sealed, so that no process can shrink it, which would end
// readers by SIGBUS. Address space is allocated at once; memory is allocated by page, when it is
// reserved or first accessed. New pages read as zeros. The descriptor is close-on-exec; a child
// that was forked without exec keeps the memory alive.
//
// Movable; owns descriptor and mapping. Thread-compatible; Reserve of different ranges may run
// in several threads and processes at once.
class SharedMemory {
 public:
  // Empty: data() is null, size() is 0.
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // Creates `bytes` (more than 0), rounded up to pages. Allocates no memory yet.
  // ResourceExhausted, with the name of the limit, if one is too low (RLIMIT_FSIZE, RLIMIT_AS,
  // descriptors); FailedPrecondition if the kernel or a seccomp filter does not allow memfds.
  static absl::StatusOr<SharedMemory> Create(size_t bytes);

  // Maps the memory of another process. Takes ownership of `fd`, also on failure. InvalidArgument
  // if its size is not sealed; other errors as Create.
  static absl::StatusOr<SharedMemory> Map(int fd);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // bytes, whole pages
  int fd() const { return fd_.get(); }   // stays owned by this object

  // Allocates memory for [offset, offset + bytes), rounded outward to pages, so that accesses
  // cannot fail later: if no page is available on first access, the process ends by SIGBUS or by
  // the OOM killer. Contents are kept. Takes about 0.3 s per GiB of new memory, in the calling
  // thread; checks the memory limits repeatedly, because other processes allocate at the same time.
  // ResourceExhausted names the limit, how much is available, and what to raise; a part of the
  // range may have been reserved. OutOfRange outside [0, size()).
  absl::Status Reserve(size_t offset, size_t bytes);

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
