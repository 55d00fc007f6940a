// One operation of a caller, and its state in the engine.
//
//   EngineOp op;
//   op.requests.push_back(request);
//   op.timeout_ns = 60'000'000'000;
//   engine->Submit(&op);
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "backends/shm/engine/request.h"

namespace ddp::backends::shm {

// The caller owns it and sets the public members before Submit; the engine writes the rest. done()
// is thread-safe; status() and source() may be called once done() is true.
class EngineOp {
 public:
  virtual ~EngineOp() = default;

  // Run one after another; a coalesced collective has several.
  absl::InlinedVector<Request, 1> requests;
  // Maximum duration of all requests together, in nanoseconds. It starts when the engine first
  // checks for failures, at most 50 ms after Submit, so that a fast call does not read the clock.
  int64_t timeout_ns = 0;

  // Whether AfterDone() is called. The object must then live until it returns; otherwise only until
  // done().
  bool calls_after_done = false;

  // Whether BeforeDone() is called.
  bool calls_before_done = false;

  bool done() const { return done_.load(std::memory_order_acquire); }
  const absl::Status& status() const { return status_; }
  // Returns the rank that sent the message of a receive; otherwise -1.
  int source() const { return source_; }

 protected:
  // Called once, after the data has arrived and before done() becomes true, on the thread that
  // advances the operation. Must not call the engine.
  virtual void BeforeDone() {}

  // Called once, after done() has become true, without locks held, on the thread that completed the
  // operation. The engine does not use the object afterwards.
  virtual void AfterDone() {}

 private:
  friend class Engine;
  friend class PointToPoint;

  absl::Status status_;
  int source_ = -1;
  size_t next_request_ = 0;
  int64_t deadline_ns_ = 0;  // of NowNs; 0: the timeout has not started
  std::atomic<bool> done_{false};
};

}  // namespace ddp::backends::shm
