// Coroutines for collectives: straight-line code that suspends where it has to wait. Any thread can
// resume it, and one thread can run many.
//
//   using Coroutine = ddp::backends::Coroutine<Reach>;
//   Coroutine Example(View view) {
//     ...
//     co_await Reach{...};     // waits until Reach::Ready(); its value is Reach::Result()
//     co_return absl::OkStatus();
//   }
//   Coroutine coroutine = Example(view);
//   while (!coroutine.Advance()) { /* coroutine.pending() is not ready */ }
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "absl/status/status.h"

namespace ddp::backends {

// `Point` is the condition that a coroutine waits for. It is constructed from the operand of
// co_await and has
//   bool Ready();     // not called again once it has returned true
//   T Result();       // value of the co_await; T may be void
//
// Movable; owns the coroutine, which starts with the first Advance. Thread-compatible: one thread
// at a time may advance it. A coroutine may await coroutines of the same Point.
template <typename Point>
class [[nodiscard]] Coroutine {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Coroutine() = default;
  explicit Coroutine(Handle handle) : handle_(handle) {}
  Coroutine(Coroutine&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Coroutine& operator=(Coroutine&& other) noexcept {
    if (this != &other) {
      Reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Coroutine() { Reset(); }

  bool empty() const { return handle_ == nullptr; }

  // Whether Advance would make progress.
  bool Ready() const {
    const Position& position = handle_.promise().own;
    return position.pending == nullptr || position.pending->Ready();
  }

  // Runs to the next point that is not ready. True if the coroutine has finished; see status().
  bool Advance() {
    if (!Ready()) return false;
    Position& position = handle_.promise().own;
    const std::coroutine_handle<> here = position.innermost;
    position.pending = nullptr;
    (here == nullptr ? std::coroutine_handle<>(handle_) : here).resume();
    return handle_.done();
  }

  // The point at which the coroutine waits; null before the first Advance and after the end.
  const Point* pending() const { return handle_.promise().own.pending; }
  absl::Status status() const { return handle_.promise().status; }

 private:
  // The point at which the outermost coroutine waits; it may be in a nested coroutine.
  struct Position {
    Point* pending = nullptr;  // in the frame of the innermost coroutine
    std::coroutine_handle<> innermost;
  };

  void Reset() {
    if (handle_ != nullptr) handle_.destroy();
    handle_ = nullptr;
  }

  Handle handle_ = nullptr;
};

template <typename Point>
struct Coroutine<Point>::promise_type {
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

  struct AwaitCoroutine {
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

  Coroutine get_return_object() { return Coroutine(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() const noexcept { return {}; }
  Final final_suspend() const noexcept { return {}; }
  void return_value(absl::Status result) { status = std::move(result); }
  // Arguments are checked before a collective starts, so only std::bad_alloc can be thrown.
  void unhandled_exception() const noexcept { std::terminate(); }

  AwaitPoint await_transform(Point point) const { return {std::move(point), position}; }
  // The awaited coroutine is a temporary in the frame of the awaiting coroutine until it has
  // finished.
  AwaitCoroutine await_transform(const Coroutine& child) const { return {child.handle_, position}; }
};

}  // namespace ddp::backends
