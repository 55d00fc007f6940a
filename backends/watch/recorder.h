// Records the last collectives of one rank, at a cost of a few nanoseconds each.
//
//   Recorder recorder({.acquire = &Acquire, .release = &Release});
//   const uint64_t number = recorder.Begin(record);      // 1, 2, 3, …
//   recorder.Attach(number, work);                        // if it continues in the background
//   recorder.End(number);
//
// A ring buffer of fixed size: no allocation, no clock. Readers (a watchdog) are expected to be
// rare.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/watch/call_record.h"

namespace ddp::backends::watch {

// Thread-safe. Concurrent calls of Begin are numbered in any order: callers must order their
// collectives themselves, as in every c10d group.
class Recorder {
 public:
  // Reference counting of the object that knows whether a collective has completed (its Work).
  struct Handles {
    void (*acquire)(void* handle) = nullptr;
    void (*release)(void* handle) = nullptr;
  };

  static constexpr uint64_t kSlots = 1024;
  // For older collectives, only the signature at each multiple of kMarkEvery is kept (a mark), for
  // the last kMarks of them.
  static constexpr uint64_t kMarkEvery = 1024;
  static constexpr uint64_t kMarks = 1024;

  explicit Recorder(Handles handles);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Call it before the collective. Returns the collective's number.
  uint64_t Begin(const CallRecord& record);
  // Call it after the collective's call, if the collective continues. It borrows `handle` until End
  // or Abandon.
  void Attach(uint64_t number, void* handle);
  // The collective has ended, with or without an error. May be called more than once.
  void End(uint64_t number);
  // The caller drops a collective that continues. Takes over the caller's reference to `handle`,
  // which was attached before; End releases it.
  void Abandon(uint64_t number, void* handle);
  // The call was rejected before it had any effect: withdraws its number. False if a later number
  // was assigned already.
  bool Cancel(uint64_t number);
  // From now on a thread waits for the collective.
  void SetAwaited(uint64_t number);
  // Releases all handles that Abandon has taken over.
  void Clear();

  struct Entry {
    uint64_t number = 0;
    CallRecord record = {};
    uint64_t signature = 0;  // of all collectives up to this one
    bool ended = false;
  };
  // A collective that has not ended. `handle` is acquired for the reader, who must release it; null
  // during the call itself.
  struct Pending {
    uint64_t number = 0;
    CallRecord record = {};
    void* handle = nullptr;
    bool awaited = false;  // a thread waits for it, during the call or later
  };

  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  // The newest `size` entries, oldest first.
  std::vector<Entry> Tail(uint64_t size) const;
  // Oldest first.
  std::vector<Pending> NotEnded() const;
  // "#17 allreduce(sum) float32 [1000]", for messages; "#17" if its record is overwritten.
  std::string Name(uint64_t number) const;
  // Signature after collective `number`; none if it is not known any more, or not yet.
  std::optional<uint64_t> SignatureAt(uint64_t number) const;

 private:
  struct alignas(64) Slot {
    CallRecord record = {};
    uint64_t signature = 0;
    uint64_t number = 0;
    void* handle = nullptr;
    bool ended = true;
    bool owned = false;
    bool awaited = false;
  };
  static_assert(sizeof(Slot) == 64, "one cache line");

  // A spinlock, held for a few nanoseconds, three times per collective; a mutex would cost three
  // times as much. Yields the core if the holder seems to be preempted.
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
  // lock_ guards all below; count_ is also read without it.
  std::atomic<uint64_t> count_{0};
  uint64_t signature_ = 0;
  std::unique_ptr<std::array<Slot, kSlots>> slots_;
  std::unique_ptr<std::array<uint64_t, kMarks>> marks_;
};

}  // namespace ddp::backends::watch
