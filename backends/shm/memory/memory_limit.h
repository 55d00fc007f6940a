// How much memory this process can still allocate before it reaches a limit or the kernel's OOM
// killer ends it.
//
//   MemoryHeadroom room = AvailableMemory();
//   if (bytes > room.bytes) return absl::ResourceExhaustedError(room.bound);
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::backends::shm {

struct MemoryHeadroom {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX if unknown
  // The limit that applies: "the memory cgroup /sys/fs/cgroup/job (limit 2.0 GiB, 1.5 GiB used)".
  std::string bound;
};

// The minimum of the machine's MemAvailable and of what is left in this process's memory cgroup
// (version 1 or 2) and in each of its ancestors. Page cache counts as free, because it can be
// dropped; swap is not counted. An estimate: other processes allocate and free memory meanwhile.
// Thread-safe; takes about 0.2 ms. `root` is put before each path that is read; for tests.
MemoryHeadroom AvailableMemory(absl::string_view root = "");

// "1.5 GiB", "512.0 MiB", "17 bytes".
std::string FormatBytes(uint64_t bytes);

}  // namespace ddp::backends::shm
