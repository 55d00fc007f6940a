// Publishes a counter to peers, and wakes those that sleep. The order of memory accesses here
// prevents lost wake-ups (docs/shm_protocol.md, "Sleeping").
//
//   signals.Publish(&control.staged, 7);
#pragma once

#include <atomic>
#include <cstdint>

#include "backends/shm/engine/futex.h"
#include "backends/shm/engine/layout.h"

namespace ddp::backends::shm {

// Bits of Control::sleeping, used as futex masks. A thread in Wait is woken in preference to the
// group's own thread, which would have to pass the result on to it.
enum Sleeper : uint32_t { kNobody = 0, kGroupThread = 1, kWaiter = 2 };

// Copies are cheap and equal. Thread-safe.
class Signals {
 public:
  Signals(const View& view, int rank) : view_(view), rank_(rank) {}

  // Stores `value` and wakes sleeping peers. A thread that reads `value` sees all earlier writes of
  // this thread.
  void Publish(std::atomic<uint64_t>* word, uint64_t value) const {
    word->store(value, std::memory_order_seq_cst);
    for (int peer = 0; peer < view_.world_size(); ++peer) {
      if (peer != rank_) RingIfAsleep(peer);
    }
  }

  // Publish in two parts, for the fast path: Store, then RingAll, which wakes sleeping peers. In
  // between, the caller may only check whether it has to wait; it must not sleep, compute or
  // return.
  void Store(std::atomic<uint64_t>* word, uint64_t value) const { word->store(value, kStoreOrder); }
  void RingAll() const {
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    for (int peer = 0; peer < view_.world_size(); ++peer) {
      if (peer != rank_) RingIfAsleep(peer);
    }
  }

  // Does as Publish, but wakes only `peer`: no other rank may wait for this word.
  void PublishTo(int peer, std::atomic<uint64_t>* word, uint64_t value) const {
    word->store(value, std::memory_order_seq_cst);
    RingIfAsleep(peer);
  }

  // Wakes all sleeping threads of `rank`, which may be this one, and those about to sleep.
  void Ring(int rank) const {
    Control& control = view_.control(rank);
    control.sleeping.store(kNobody, std::memory_order_seq_cst);
    control.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex::Wake(&control.doorbell, futex::kAnyone);
  }

  void RingIfAsleep(int rank) const {
    Control& control = view_.control(rank);
    // Sequentially consistent, after the store of the word: either this load sees the sleeper, or
    // the sleeper's last check sees the store.
    if (control.sleeping.load(std::memory_order_seq_cst) == kNobody) return;
    // If several ranks publish at once, one of them wakes the sleeper.
    const uint32_t who = control.sleeping.exchange(kNobody, std::memory_order_seq_cst);
    if (who == kNobody) return;
    control.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex::Wake(&control.doorbell, who);
  }

 private:
  // ThreadSanitizer does not support fences; with it the store itself is sequentially consistent.
#if defined(__SANITIZE_THREAD__)
  static constexpr std::memory_order kStoreOrder = std::memory_order_seq_cst;
#else
  static constexpr std::memory_order kStoreOrder = std::memory_order_release;
#endif

  View view_;
  int rank_;
};

}  // namespace ddp::backends::shm
