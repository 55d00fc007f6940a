// Allocator for the arena of this rank: the part of the shared segment that holds tensors.
//
//   Arena arena(memory, offset, bytes);
//   std::byte* tensor = arena.Allocate(25 << 20);     // null: no room; use ordinary memory
//   arena.Free(tensor);
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "backends/shm/memory/memfd.h"

namespace ddp::backends::shm {

// First fit, in whole pages. Freed memory is kept for later allocations and not returned to the
// system, because the first access to a new page is slow. Thread-safe.
class Arena {
 public:
  // Manages [begin, begin + bytes) of `memory`, which is borrowed.
  Arena(SharedMemory* memory, size_t begin, size_t bytes);

  // Page-aligned; null if the arena is full, or no memory is left on this machine.
  std::byte* Allocate(size_t bytes);

  // `block` is a result of Allocate.
  void Free(std::byte* block);

 private:
  SharedMemory* const memory_;

  std::mutex mutex_;
  size_t reserved_until_;          // memory up to this offset has been reserved
  std::map<size_t, size_t> free_;  // offset -> bytes; adjacent blocks are merged
  std::map<size_t, size_t> taken_;
};

}  // namespace ddp::backends::shm
