#include "backends/watch/recorder.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"

namespace ddp::backends::watch {

Recorder::Lock::Lock(std::atomic_flag& flag) : flag_(flag) {
  for (int tries = 0; flag_.test_and_set(std::memory_order_acquire); ++tries) {
    if (tries > 16) std::this_thread::yield();
  }
}

Recorder::Recorder(Handles handles)
    : handles_(handles),
      slots_(std::make_unique<std::array<Slot, kSlots>>()),
      marks_(std::make_unique<std::array<uint64_t, kMarks>>()) {}

Recorder::~Recorder() { Clear(); }

Recorder::Slot* Recorder::Find(uint64_t number) {
  Slot& slot = (*slots_)[number % kSlots];
  return slot.number == number ? &slot : nullptr;
}

uint64_t Recorder::Begin(const CallRecord& record) {
  void* overwritten = nullptr;
  uint64_t number;
  {
    Lock lock(lock_);
    number = count_.load(std::memory_order_relaxed) + 1;
    Slot& slot = (*slots_)[number % kSlots];
    if (slot.owned) overwritten = slot.handle;
    signature_ = Extend(signature_, record);
    slot = {.record = record, .signature = signature_, .number = number, .ended = false};
    slot.awaited = true;
    if (number % kMarkEvery == 0) (*marks_)[number / kMarkEvery % kMarks] = signature_;
    count_.store(number, std::memory_order_relaxed);
  }
  if (overwritten != nullptr) handles_.release(overwritten);
  return number;
}

void Recorder::Attach(uint64_t number, void* handle) {
  Lock lock(lock_);
  if (Slot* slot = Find(number)) {
    slot->handle = handle;
    slot->awaited = false;
  }
}

void Recorder::End(uint64_t number) {
  void* owned = nullptr;
  {
    Lock lock(lock_);
    Slot* slot = Find(number);
    if (slot == nullptr) return;
    if (slot->owned) owned = slot->handle;
    slot->handle = nullptr;
    slot->owned = false;
    slot->ended = true;
  }
  if (owned != nullptr) handles_.release(owned);
}

void Recorder::Abandon(uint64_t number, void* handle) {
  {
    Lock lock(lock_);
    Slot* slot = Find(number);
    if (slot != nullptr && !slot->ended) {
      slot->handle = handle;
      slot->owned = true;
      slot->awaited = false;
      return;
    }
  }
  handles_.release(handle);
}

bool Recorder::Cancel(uint64_t number) {
  Lock lock(lock_);
  Slot* slot = Find(number);
  if (slot != nullptr) slot->ended = true;
  if (count_.load(std::memory_order_relaxed) != number) return false;
  // The previous slot still has its entry: only a later number could have overwritten it.
  const Slot& before = (*slots_)[(number - 1) % kSlots];
  signature_ = number == 1 ? 0 : before.signature;
  *slot = Slot{};
  count_.store(number - 1, std::memory_order_relaxed);
  return true;
}

void Recorder::SetAwaited(uint64_t number) {
  Lock lock(lock_);
  if (Slot* slot = Find(number)) slot->awaited = true;
}

void Recorder::Clear() {
  std::vector<void*> owned;
  {
    Lock lock(lock_);
    for (Slot& slot : *slots_) {
      if (slot.owned) owned.push_back(slot.handle);
      slot.handle = nullptr;
      slot.owned = false;
    }
  }
  for (void* handle : owned) handles_.release(handle);
}

std::vector<Recorder::Entry> Recorder::Tail(uint64_t size) const {
  std::vector<Entry> entries;
  entries.reserve(std::min(size, kSlots));
  Lock lock(lock_);
  const uint64_t count = count_.load(std::memory_order_relaxed);
  for (uint64_t number = count - std::min({size, count, kSlots}) + 1; number <= count; ++number) {
    const Slot& slot = (*slots_)[number % kSlots];
    if (slot.number != number) continue;  // withdrawn by Cancel
    entries.push_back({number, slot.record, slot.signature, slot.ended});
  }
  return entries;
}

std::vector<Recorder::Pending> Recorder::NotEnded() const {
  std::vector<Pending> pending;
  pending.reserve(kSlots);
  Lock lock(lock_);
  const uint64_t count = count_.load(std::memory_order_relaxed);
  for (uint64_t number = count - std::min(count, kSlots) + 1; number <= count; ++number) {
    const Slot& slot = (*slots_)[number % kSlots];
    if (slot.number != number || slot.ended) continue;
    if (slot.handle != nullptr) handles_.acquire(slot.handle);
    pending.push_back({number, slot.record, slot.handle, slot.awaited});
  }
  return pending;
}

std::string Recorder::Name(uint64_t number) const {
  std::optional<CallRecord> record;
  {
    Lock lock(lock_);
    const Slot& slot = (*slots_)[number % kSlots];
    if (slot.number == number) record = slot.record;
  }
  return record ? absl::StrCat("#", number, " ", ToString(*record)) : absl::StrCat("#", number);
}

std::optional<uint64_t> Recorder::SignatureAt(uint64_t number) const {
  Lock lock(lock_);
  if (number == 0) return 0;
  const uint64_t count = count_.load(std::memory_order_relaxed);
  if (number > count) return std::nullopt;
  const Slot& slot = (*slots_)[number % kSlots];
  if (slot.number == number) return slot.signature;
  if (number % kMarkEvery != 0) return std::nullopt;
  if (count / kMarkEvery - number / kMarkEvery >= kMarks) return std::nullopt;
  return (*marks_)[number / kMarkEvery % kMarks];
}

}  // namespace ddp::backends::watch
