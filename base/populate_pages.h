// Memory that is written whole, without a page fault for each page.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace ddp {

// Asks Linux for the pages of [begin, begin + bytes) in one call, where a write to each page that
// has none yet is a fault of its own: about twice as long, and longer than a copy into the memory.
// Pages that are there keep their bytes. Nothing depends on its success (Linux before 5.14 does not
// know it). Transparent huge pages would take less time again, but a virtual machine whose host
// gives it memory on demand waited up to seconds for them. Thread-safe.
inline void PopulatePages(void* begin, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  const auto first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / kPage * kPage;
  if (first < last) (void)::madvise(reinterpret_cast<void*>(first), last - first, kPopulateWrite);
}

}  // namespace ddp
