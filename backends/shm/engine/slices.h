// Partition sizes and copy functions of the collective algorithms.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backends/shm/engine/layout.h"

namespace ddp::backends::shm {

inline uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

inline void Copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// Requests the cache line for writing. A hint: any address is allowed.
inline void PrefetchToWrite(const void* at) {
#if defined(__x86_64__)
  // __builtin_prefetch(at, 1) becomes a prefetch for reading unless the compiler may assume
  // prefetchw. All 64-bit processors accept prefetchw (a few of the oldest as a no-op).
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, /*rw=*/1);
#endif
}

// Copies to memory that other cores have read last, so that each line must be taken from their
// caches. Prefetching blocks of lines overlaps these transfers, which takes a quarter less time;
// not faster below 16 KiB.
inline void CopyToShared(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kMinPrefetchBytes = 16 << 10;
  constexpr size_t kBlock = 2 << 10;
  if (bytes < kMinPrefetchBytes) return Copy(to, from, bytes);
  const auto prefetch = [=](size_t begin) {
    const size_t end = std::min(begin + kBlock, bytes);
    for (size_t at = begin; at < end; at += kCacheLine) PrefetchToWrite(to + at);
  };
  prefetch(0);
  for (size_t at = 0; at < bytes; at += kBlock) {
    prefetch(at + kBlock);
    Copy(to + at, from + at, std::min(kBlock, bytes - at));
  }
}

// Splits `count` elements into one slice per rank, in whole cache lines. The last slices may be
// shorter or empty.
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
