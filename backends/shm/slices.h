// Sizes and copies that the algorithms share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backends/shm/layout.h"

namespace ddp::backends::shm {

inline uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

inline void Copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// A slice of `count` elements per rank, in whole cache lines where it can be.
struct Slices {
  Slices(size_t count, int ranks, size_t element_bytes) : count(count) {
    const size_t line = std::max<size_t>(1, kCacheLine / element_bytes);
    each = CeilDiv(CeilDiv(count, ranks), line) * line;
  }
  size_t Begin(int rank) const { return std::min(count, each * rank); }
  size_t Size(int rank) const { return Begin(rank + 1) - Begin(rank); }

  size_t count;
  size_t each;
};

}  // namespace ddp::backends::shm
