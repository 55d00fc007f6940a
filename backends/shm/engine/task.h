// What a collective waits for in shared memory: that peers have come so far.
//
//   co_await Reach{...};     // in a Task
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backends/common/task.h"

namespace ddp::backends::shm {

// Counters of one peer, or of all, and the value that they have to come to. Loads are sequentially
// consistent, as the sleeping protocol needs (docs/shm_protocol.md).
struct Reach {
  const std::byte* words = nullptr;  // rank 0's counter; the others' at `stride` bytes
  size_t stride = 0;
  uint64_t value = 0;
  int peer = 0;  // the first that is not there yet
  int end = 0;
  int self = -1;  // not waited for

  bool Ready() {
    for (; peer < end; ++peer) {
      const auto* word = reinterpret_cast<const std::atomic<uint64_t>*>(
          words + static_cast<size_t>(peer) * stride);
      if (peer != self && word->load(std::memory_order_seq_cst) < value) return false;
    }
    return true;
  }
  void Result() const {}
};

using Task = ::ddp::backends::Task<Reach>;

}  // namespace ddp::backends::shm
