#include "backends/watch/call_history.h"

#include <exception>

#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::watch {
namespace {

c10d::Work* AsWork(void* handle) { return static_cast<c10d::Work*>(handle); }
void Acquire(void* handle) { c10::raw::intrusive_ptr::incref(AsWork(handle)); }
void Release(void* handle) { c10::raw::intrusive_ptr::decref(AsWork(handle)); }

bool IsCompleted(void* handle) {
  try {
    return AsWork(handle)->isCompleted();
  } catch (const std::exception&) {
    return true;  // the thread that waits for it gets the error
  }
}

std::optional<CallHistory::Call> Oldest(Recorder& recorder, bool awaited_only) {
  std::optional<CallHistory::Call> oldest;
  for (const Recorder::Pending& pending : recorder.NotEnded()) {
    const bool ended = pending.handle != nullptr && IsCompleted(pending.handle);
    if (ended) recorder.End(pending.number);
    if (pending.handle != nullptr) Release(pending.handle);
    if (ended || oldest || (awaited_only && !pending.awaited)) continue;
    oldest = {.number = pending.number, .record = pending.record};
  }
  return oldest;
}

}  // namespace

CallHistory::CallHistory(int size)
    : collectives_({&Acquire, &Release}),
      messages_({&Acquire, &Release}),
      sent_(size),
      received_(size) {}

void CallHistory::CountMessage(bool sent, int peer) {
  if (peer < 0 || static_cast<size_t>(peer) >= sent_.size()) return;
  (sent ? sent_ : received_)[peer].fetch_add(1, std::memory_order_relaxed);
}

std::optional<CallHistory::Call> CallHistory::OldestCollective() {
  return Oldest(collectives_, /*awaited_only=*/false);
}

std::optional<CallHistory::Call> CallHistory::OldestMessage() {
  return Oldest(messages_, /*awaited_only=*/true);
}

void CallHistory::AbortMessages() {
  for (const Recorder::Pending& pending : messages_.NotEnded()) {
    if (pending.handle == nullptr) continue;
    try {
      AsWork(pending.handle)->abort();
    } catch (const std::exception&) {
      // The abort of the backend follows.
    }
    Release(pending.handle);
  }
}

void CallHistory::Clear() {
  collectives_.Clear();
  messages_.Clear();
}

}  // namespace ddp::backends::watch
