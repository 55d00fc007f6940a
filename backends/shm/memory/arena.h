// Tensors that live in the shared segment: this rank's part of it, handed out piece by piece.
//
//   Arena arena(memory, offset, bytes);
//   std::byte* tensor = arena.Allocate(25 << 20);     // null: no room; take ordinary memory
//   arena.Free(tensor);
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "backends/shm/memory/memfd.h"

namespace ddp::backends::shm {

// First fit, in whole pages. Memory that has been freed stays this rank's, for the next: the first
// touch of a page costs more than all later ones. Thread-safe.
class Arena {
 public:
  // [begin, begin + bytes) of `memory`, which outlives this.
  Arena(SharedMemory* memory, size_t begin, size_t bytes);

  // Page-aligned; null if there is no room, or no memory left on this machine.
  std::byte* Allocate(size_t bytes);

  // What Allocate gave.
  void Free(std::byte* block);

  bool Contains(const void* pointer) const;

 private:
  SharedMemory* const memory_;
  const size_t begin_;
  const size_t end_;

  std::mutex mutex_;
  size_t reserved_until_;          // memory is there for what lies before
  std::map<size_t, size_t> free_;  // offset -> bytes; neighbours are joined
  std::map<size_t, size_t> taken_;
};

}  // namespace ddp::backends::shm
