// The condition that coroutines of backend shm wait for: counters of peers have reached a value.
//
//   co_await Reach{...};     // in a Coroutine
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backends/common/coroutine.h"

namespace ddp::backends::shm {

// The counters of ranks peer … end-1, and the value that they have to reach. Loads are sequentially
// consistent, as the sleeping protocol requires (docs/shm_protocol.md).
struct Reach {
  const std::byte* words = nullptr;  // counter of rank 0
  size_t stride = 0;                 // bytes from one rank's counter to the next
  uint64_t value = 0;
  int peer = 0;  // the first rank whose counter has not reached `value`
  int end = 0;
  int self = -1;  // this rank is skipped

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

using Coroutine = ::ddp::backends::Coroutine<Reach>;

}  // namespace ddp::backends::shm
