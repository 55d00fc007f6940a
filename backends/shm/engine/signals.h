// Publishing a counter to peers, who may sleep: the one place where the order of memory accesses
// decides whether anybody sleeps for ever (docs/shm_protocol.md, "Sleeping").
//
//   signals.Publish(&control.staged, 7);       // peers that sleep are woken
#pragma once

#include <atomic>
#include <cstdint>

#include "backends/shm/engine/futex.h"
#include "backends/shm/engine/layout.h"

namespace ddp::backends::shm {

// Bits of Control::sleeping, which are futex masks: a thread in Wait is woken rather than the
// group's own thread, which would have to hand the result over to it.
enum Sleeper : uint32_t { kNobody = 0, kGroupThread = 1, kWaiter = 2 };

// Copies are cheap and equal. Thread-safe.
class Signals {
 public:
  Signals(const View& view, int rank) : view_(view), rank_(rank) {}

  // Everything written before is visible to whoever sees `value`.
  void Publish(std::atomic<uint64_t>* word, uint64_t value) const {
    word->store(value, std::memory_order_seq_cst);
    for (int peer = 0; peer < view_.world_size(); ++peer) {
      if (peer != rank_) RingIfAsleep(peer);
    }
  }

  // The same in two parts, for what is on its way back to a spinning peer in a fraction of a
  // microsecond: the store, and what makes sure that nobody sleeps through it. In between, the
  // caller may look whether it has to wait at all; it must not sleep, compute or return.
  void Store(std::atomic<uint64_t>* word, uint64_t value) const { word->store(value, kStoreOrder); }
  void RingAll() const {
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    for (int peer = 0; peer < view_.world_size(); ++peer) {
      if (peer != rank_) RingIfAsleep(peer);
    }
  }

  // As Publish, where only `peer` waits for the word.
  void PublishTo(int peer, std::atomic<uint64_t>* word, uint64_t value) const {
    word->store(value, std::memory_order_seq_cst);
    RingIfAsleep(peer);
  }

  // Makes `rank`, who may be this one, look around, asleep or about to be.
  void Ring(int rank) const {
    Control& control = view_.control(rank);
    control.sleeping.store(kNobody, std::memory_order_seq_cst);
    control.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex::Wake(&control.doorbell, futex::kAnyone);
  }

  void RingIfAsleep(int rank) const {
    Control& control = view_.control(rank);
    // Sequentially consistent, after the store above: either this load sees the sleeper, or the
    // sleeper's last look sees the store.
    if (control.sleeping.load(std::memory_order_seq_cst) == kNobody) return;
    // Of several that publish at once, one rings.
    const uint32_t who = control.sleeping.exchange(kNobody, std::memory_order_seq_cst);
    if (who == kNobody) return;
    control.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex::Wake(&control.doorbell, who);
  }

 private:
  // ThreadSanitizer knows no fences, so there the store itself is sequentially consistent.
#if defined(__SANITIZE_THREAD__)
  static constexpr std::memory_order kStoreOrder = std::memory_order_seq_cst;
#else
  static constexpr std::memory_order kStoreOrder = std::memory_order_release;
#endif

  View view_;
  int rank_;
};

}  // namespace ddp::backends::shm
