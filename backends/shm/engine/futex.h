// Futex system calls: sleep on a 32-bit word in memory that processes share. Thread-safe.
//
//   futex::Wait(&word, /*expected=*/seen, futex::kAnyone, /*timeout_ns=*/50'000'000);
//   word.fetch_add(1); futex::Wake(&word, futex::kAnyone);
#pragma once

#include <atomic>
#include <cstdint>

namespace ddp::backends::shm::futex {

constexpr uint32_t kAnyone = 0xffffffff;

// Returns when woken by a Wake with a common bit in `mask`, when `word` is not `expected` (checked
// atomically with falling asleep), after `timeout_ns`, or spuriously: the caller must check again.
void Wait(const std::atomic<uint32_t>* word, uint32_t expected, uint32_t mask, int64_t timeout_ns);

// Wakes all sleepers on `word`, in any process, that have a common bit in `mask`.
void Wake(const std::atomic<uint32_t>* word, uint32_t mask);

}  // namespace ddp::backends::shm::futex
