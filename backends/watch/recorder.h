// The last collectives of one rank, noted down at a cost of some nanoseconds each.
//
//   Recorder recorder({.acquire = &Acquire, .release = &Release});
//   const uint64_t number = recorder.Begin(record);      // 1, 2, 3, …
//   recorder.Attach(number, work);                        // where it goes on in the background
//   recorder.End(number);
//
// A ring of fixed size, no allocation and no clock. What reads it (a watchdog) does so seldom.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/watch/record.h"

namespace ddp::backends::watch {

// Thread-safe. Threads that call at the same time get numbers in some order: that of their calls is
// theirs to settle, as in every c10d group.
class Recorder {
 public:
  // How to share the object that tells whether a collective has come to its end (its Work).
  struct Handles {
    void (*acquire)(void* handle) = nullptr;
    void (*release)(void* handle) = nullptr;
  };

  static constexpr uint64_t kSlots = 1024;
  // Beyond the ring, the signature is kept at each multiple of so many collectives.
  static constexpr uint64_t kMarkEvery = 1024;
  static constexpr uint64_t kMarks = 1024;

  explicit Recorder(Handles handles);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Before the call. Returns its number.
  uint64_t Begin(const Record& record);
  // After it, if it goes on: `handle` is borrowed until End or Abandon.
  void Attach(uint64_t number, void* handle);
  // It has come to its end, well or not. May be said more than once.
  void End(uint64_t number);
  // The caller has lost interest in a collective that goes on: `handle`, attached before, is handed
  // over, and released by End.
  void Abandon(uint64_t number, void* handle);
  // The call was refused before it had any effect: the number is taken back. False if a later one
  // has been given out.
  bool Cancel(uint64_t number);
  // A thread waits for it from now on.
  void SetAwaited(uint64_t number);
  // Releases what Abandon handed over.
  void Clear();

  struct Entry {
    uint64_t number = 0;
    Record record = {};
    uint64_t signature = 0;  // of all up to this one
    bool ended = false;
  };
  // Of collectives not ended. `handle` is acquired for the reader, who releases it; null during the
  // call itself.
  struct Pending {
    uint64_t number = 0;
    Record record = {};
    void* handle = nullptr;
    bool awaited = false;  // a thread waits for it, in the call or after
  };

  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  // The newest `size` entries, oldest first.
  std::vector<Entry> Tail(uint64_t size) const;
  // Oldest first.
  std::vector<Pending> NotEnded() const;
  // "#17 allreduce(sum) float32 [1000]", as messages name it; "#17" if it is too old for more.
  std::string Name(uint64_t number) const;
  // Signature after collective `number`; none if that is no longer, or not yet, known.
  std::optional<uint64_t> SignatureAt(uint64_t number) const;

 private:
  struct alignas(64) Slot {
    Record record = {};
    uint64_t signature = 0;
    uint64_t number = 0;
    void* handle = nullptr;
    bool ended = true;
    bool owned = false;
    bool awaited = false;
  };
  static_assert(sizeof(Slot) == 64, "one cache line");

  // Held for a few nanoseconds, three times a collective: a mutex costs three times as much.
  // Whoever meets a holder that has lost its core gives up its own.
  class Lock {
   public:
    explicit Lock(std::atomic_flag& flag);
    ~Lock() { flag_.clear(std::memory_order_release); }

   private:
    std::atomic_flag& flag_;
  };

  // The slot of `number`, or null if a later collective has taken it.
  Slot* Find(uint64_t number);

  const Handles handles_;
  mutable std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
  // All below under lock_; the count is read without, too.
  std::atomic<uint64_t> count_{0};
  uint64_t signature_ = 0;
  std::unique_ptr<std::array<Slot, kSlots>> slots_;
  std::unique_ptr<std::array<uint64_t, kMarks>> marks_;
};

}  // namespace ddp::backends::watch
