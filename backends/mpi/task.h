// A collective as a coroutine: straight-line code that stops while MPI is busy, so that the one
// thread that speaks to MPI can drive many.
//
//   Task SendTwice(Channel& channel, Buffer buffer) {
//     for (int i = 0; i < 2; ++i) {
//       absl::Status status = channel.requests.Send(buffer, /*peer=*/1, /*tag=*/i, channel.comm);
//       if (!status.ok()) co_return status;
//       status = co_await channel.requests;             // until all of them are done
//       if (!status.ok()) co_return status;
//     }
//     co_return absl::OkStatus();
//   }
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "backends/mpi/requests.h"

namespace ddp::backends::mpi {

// Movable, owns the coroutine; nothing runs before the first Advance. Thread-compatible. Tasks may
// await tasks; all of them on one set of requests.
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

  // Goes on as far as MPI is. True: finished, see status().
  inline bool Advance();
  inline absl::Status status() const;

 private:
  // Where the outermost task stands, whichever nested one that is in.
  struct Position {
    Requests* waiting_for = nullptr;
    absl::Status result;
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

  struct AwaitRequests {
    Requests* requests;
    Position* position;
    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> self) const noexcept {
      position->waiting_for = requests;
      position->innermost = self;
    }
    absl::Status await_resume() const noexcept { return std::move(position->result); }
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
    absl::Status await_resume() const noexcept { return std::move(child.promise().status); }
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
  // Nothing in a collective throws but for want of memory.
  void unhandled_exception() const noexcept { std::terminate(); }

  AwaitRequests await_transform(Requests& requests) const { return {&requests, position}; }
  // The awaited task lives in the awaiting one's frame until it has finished.
  AwaitTask await_transform(const Task& child) const { return {child.handle_, position}; }
};

bool Task::Advance() {
  Position& position = handle_.promise().own;
  if (position.waiting_for == nullptr) {
    handle_.resume();
  }
  while (!handle_.done()) {
    const absl::StatusOr<bool> ready = position.waiting_for->Test();
    if (ready.ok() && !*ready) return false;
    position.result = ready.status();
    position.innermost.resume();
  }
  return true;
}

absl::Status Task::status() const { return handle_.promise().status; }

}  // namespace ddp::backends::mpi
