// Fetching a cache line to own it. A line that a core has to itself is written at once; one that
// another core has also read must first be taken from there, which costs what a miss costs.
#pragma once

namespace ddp::backends::shm {

// For the core to write to, or to have the line to itself when it has been read. A hint: any
// address will do.
inline void PrefetchToWrite(const void* at) {
#if defined(__x86_64__)
  // What __builtin_prefetch(at, 1) is without -mprfchw only reads, and leaves the line shared. All
  // 64-bit processors take this one, a few of the oldest for a no-op.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, /*rw=*/1);
#endif
}

}  // namespace ddp::backends::shm
