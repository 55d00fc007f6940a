// What a caller has handed to the engine: one operation, and what becomes of it.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "backends/shm/engine/request.h"

namespace ddp::backends::shm {

class EngineOp {
 public:
  virtual ~EngineOp() = default;

  // To be set before it is submitted: the requests are run one after another (a coalesced
  // collective has several), and all of it has `timeout_ns`, which begins when
  // the engine first looks around for what keeps it, 50 ms after the call at most: a fast call
  // costs no look at the clock.
  absl::InlinedVector<Request, 1> requests;
  int64_t timeout_ns = 0;

  // Asks for Finished(). The object must then live until that has been called; otherwise only until
  // it is done.
  bool wants_finished = false;

  // Asks for Completing().
  bool wants_completing = false;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Once done.
  const absl::Status& status() const { return status_; }
  // Of a receive that is done.
  int source() const { return source_; }

 protected:
  // Called once, when the data has arrived, before done() becomes true, on the thread that drives.
  // Must not call the engine.
  virtual void Completing() {}

  // Called once, soon after done() has become true, without locks, on the thread that drove it to
  // its end. The engine does not touch the object afterwards.
  virtual void Finished() {}

 private:
  friend class Engine;
  friend class PointToPoint;

  absl::Status status_;
  int source_ = -1;
  size_t next_request_ = 0;
  int64_t deadline_ns_ = 0;  // 0: the time has not begun
  std::atomic<bool> done_{false};
};

}  // namespace ddp::backends::shm
