// How much more memory this process may take before a limit, or the kernel's OOM killer, stops it.
//
//   MemoryHeadroom room = AvailableMemory();
//   if (bytes > room.bytes) return absl::ResourceExhaustedError(room.bound);
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::backends::shm {

struct MemoryHeadroom {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX where nothing is known
  // What holds it there: "the memory cgroup /sys/fs/cgroup/job (limit 2.0 GiB, 1.5 GiB used)".
  std::string bound;
};

// The least of: what our cgroup of memory (version 1 or 2) and every one above it has left, page
// cache counted as free since it can be dropped; and the machine's MemAvailable. Swap counts for
// nothing. An estimate: others take and give memory meanwhile. Thread-safe; about 0.2 ms.
// `root` stands before every path that is read: for tests.
MemoryHeadroom AvailableMemory(absl::string_view root = "");

// "1.5 GiB", "512.0 MiB", "17 bytes".
std::string FormatBytes(uint64_t bytes);

}  // namespace ddp::backends::shm
