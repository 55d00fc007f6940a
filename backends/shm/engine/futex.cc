#include "backends/shm/engine/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ddp::backends::shm::futex {

// Without FUTEX_PRIVATE_FLAG, because sleepers are in other processes.
void Wait(const std::atomic<uint32_t>* word, uint32_t expected, uint32_t mask, int64_t timeout_ns) {
  static_assert(sizeof(*word) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  constexpr int64_t kSecond = 1'000'000'000;
  // FUTEX_WAIT_BITSET, unlike FUTEX_WAIT, takes an absolute time of the monotonic clock.
  timespec until;
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += timeout_ns / kSecond;
  until.tv_nsec += timeout_ns % kSecond;
  if (until.tv_nsec >= kSecond) {
    ++until.tv_sec;
    until.tv_nsec -= kSecond;
  }
  ::syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, nullptr, mask);
}

void Wake(const std::atomic<uint32_t>* word, uint32_t mask) {
  ::syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, mask);
}

}  // namespace ddp::backends::shm::futex
