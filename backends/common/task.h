// A collective as a coroutine: straight-line code that stops where something is not there yet, so
// that whoever has time takes it further, and one thread can drive many.
//
//   using Task = ddp::backends::Task<Reach>;
//   Task Example(View view) {
//     ...
//     co_await Reach{...};     // until Reach::Ready(); gives what Reach::Result() gives
//     co_return absl::OkStatus();
//   }
//   Task task = Example(view);
//   while (!task.Advance()) { /* task.pending() is not there yet */ }
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "absl/status/status.h"

namespace ddp::backends {

// `Point` is what a task waits for. It is made from what is awaited, and has
//   bool Ready();     // whether to go on; asked again only while it says no
//   T Result();       // of the co_await; T may be void
//
// Movable, owns the coroutine; nothing runs before the first Advance. Thread-compatible: one thread
// at a time advances it. Tasks may await tasks of the same Point.
template <typename Point>
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

  // Whether Advance would do anything.
  bool Ready() const {
    const Position& position = handle_.promise().own;
    return position.pending == nullptr || position.pending->Ready();
  }

  // Goes on to the next point that is not ready. True: finished, see status().
  bool Advance() {
    if (!Ready()) return false;
    Position& position = handle_.promise().own;
    const std::coroutine_handle<> here = position.innermost;
    position.pending = nullptr;
    (here == nullptr ? std::coroutine_handle<>(handle_) : here).resume();
    return handle_.done();
  }

  // Where it stands; null before the first Advance and at the end.
  const Point* pending() const { return handle_.promise().own.pending; }
  absl::Status status() const { return handle_.promise().status; }

 private:
  // Where the outermost task stands, whichever nested one that is in.
  struct Position {
    Point* pending = nullptr;  // in the frame of the innermost
    std::coroutine_handle<> innermost;
  };

  void Reset() {
    if (handle_ != nullptr) handle_.destroy();
    handle_ = nullptr;
  }

  Handle handle_ = nullptr;
};

template <typename Point>
struct Task<Point>::promise_type {
  Position own;
  Position* position = &own;
  std::coroutine_handle<> parent;
  absl::Status status;

  struct AwaitPoint {
    Point point;
    Position* position;
    bool await_ready() { return point.Ready(); }
    void await_suspend(std::coroutine_handle<> self) noexcept {
      position->pending = &point;
      position->innermost = self;
    }
    auto await_resume() { return point.Result(); }
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
  // Nothing in a collective throws but for want of memory: what would has been checked before.
  void unhandled_exception() const noexcept { std::terminate(); }

  AwaitPoint await_transform(Point point) const { return {std::move(point), position}; }
  // The awaited task lives in the awaiting one's frame until it has finished.
  AwaitTask await_transform(const Task& child) const { return {child.handle_, position}; }
};

}  // namespace ddp::backends
