// A collective as a coroutine: straight-line code that stops where a peer is not there yet, so that
// whoever has time (the caller, a waiter, the group's thread) takes it further.
//
//   Task Example(View view) {
//     ...
//     co_await Staged(1, 5);   // a Reach: until rank 1 has staged five chunks
//     co_return absl::OkStatus();
//   }
//   Task task = Example(view);
//   while (!task.Advance()) { /* task.pending() is not there yet */ }
#pragma once

#include <atomic>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>

#include "absl/status/status.h"

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

  bool Reached() {
    for (; peer < end; ++peer) {
      const auto* word = reinterpret_cast<const std::atomic<uint64_t>*>(
          words + static_cast<size_t>(peer) * stride);
      if (peer != self && word->load(std::memory_order_seq_cst) < value) return false;
    }
    return true;
  }
};

// Movable, owns the coroutine. Thread-compatible: one thread at a time advances it. Tasks may await
// tasks.
class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      Reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Task() { Reset(); }

  bool empty() const { return handle_ == nullptr; }

  // Whether what it waits for is there.
  inline bool Ready();

  // Goes on to where the next peer is not there yet, if this one is. True: finished, see status().
  inline bool Advance();

  inline const Reach& pending() const;
  inline absl::Status status() const;

 private:
  // Where the outermost task stands, whichever nested one that is in.
  struct Position {
    Reach pending;
    std::coroutine_handle<> innermost;
  };

  void Reset() {
    if (handle_ != nullptr) handle_.destroy();
    handle_ = nullptr;
  }

  Handle handle_ = nullptr;
};

struct Task::promise_type {
  Position own;
  Position* position = &own;
  std::coroutine_handle<> parent;
  absl::Status status;

  struct AwaitReach {
    Reach reach;
    Position* position;
    bool await_ready() noexcept { return reach.Reached(); }
    void await_suspend(std::coroutine_handle<> self) noexcept {
      position->pending = reach;
      position->innermost = self;
    }
    void await_resume() const noexcept {}
  };

  struct AwaitTask {
    Handle child;
    Position* position;
    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> self) const noexcept {
      child.promise().position = position;
      child.promise().parent = self;
      return child;
    }
    absl::Status await_resume() const noexcept { return child.promise().status; }
  };

  struct Final {
    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(Handle self) const noexcept {
      if (std::coroutine_handle<> parent = self.promise().parent) return parent;
      return std::noop_coroutine();
    }
    void await_resume() const noexcept {}
  };

  Task get_return_object() { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() const noexcept { return {}; }
  Final final_suspend() const noexcept { return {}; }
  void return_value(absl::Status result) { status = std::move(result); }
  // Nothing in a collective throws: what would has been checked before it began.
  void unhandled_exception() const noexcept { std::terminate(); }

  AwaitReach await_transform(const Reach& reach) const { return {reach, position}; }
  // The awaited task lives in the awaiting one's frame until it has finished.
  AwaitTask await_transform(const Task& child) const { return {child.handle_, position}; }
};

bool Task::Ready() {
  Position& position = handle_.promise().own;
  return position.innermost == nullptr || position.pending.Reached();
}

bool Task::Advance() {
  if (!Ready()) return false;
  Position& position = handle_.promise().own;
  const std::coroutine_handle<> here = position.innermost;
  if (here == nullptr) {
    handle_.resume();
  } else {
    here.resume();
  }
  return handle_.done();
}

const Reach& Task::pending() const { return handle_.promise().own.pending; }
absl::Status Task::status() const { return handle_.promise().status; }

}  // namespace ddp::backends::shm
