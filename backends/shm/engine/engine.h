// Runs the operations of one rank of a shared-memory group: collectives in the order submitted,
// messages (send, recv) beside them.
//
//   auto engine = std::make_shared<Engine>(view, rank, std::move(peers), EngineOptions{});
//   engine->Submit(&op);  // starts it, and finishes it if the peers have started it too
//   absl::Status status = engine->Wait(&op, deadline_ns);
//   engine->Leave();
//
// Which thread does the work: Submit advances an operation as far as the peers' progress allows,
// and spins for at most some microseconds. A thread in Wait continues from there. While no thread
// waits, the group's own thread continues; only progress of the peers wakes it. So a blocking
// collective stays in the caller's thread, and an asynchronous one completes without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "backends/shm/engine/collectives.h"
#include "backends/shm/engine/coroutine.h"
#include "backends/shm/engine/engine_op.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/point_to_point.h"
#include "backends/shm/engine/signals.h"

namespace ddp::backends::shm {

int64_t NowNs();  // CLOCK_MONOTONIC, in nanoseconds

// Information about another rank that is not in the segment.
struct PeerInfo {
  std::string name;  // for error messages: "rank 3 (pid 4711)"
  // Whether its process exists. Must be cheap and thread-safe; null: always true.
  std::function<bool()> alive;
};

struct EngineOptions {
  // Maximum time that a thread spins while it waits for a peer. 0 where there are more ranks than
  // cores: a spinning thread would keep the rank from running that it waits for.
  int64_t spin_ns = 2500;
  // Maximum time that a thread in Wait then polls with sched_yield, before it sleeps. In training,
  // ranks reach a collective some hundred microseconds apart. Waking a sleeping rank costs both
  // ranks more than polling, and sched_yield leaves the core to threads that have work.
  int64_t wait_yield_ns = 2'000'000;
  // The same in Submit; applies only if the last caller went on to Wait at once. Longer than a
  // thread takes to wake up; otherwise ranks that have slept once would have to wake each other in
  // every call.
  int64_t submit_yield_ns = 20'000;
  // Whether peers may read this rank's memory directly (peer_memory.h). If it is false on one rank,
  // no rank of the group does.
  bool direct = true;
};

// Thread-safe. Must be owned by a shared_ptr; the group's own thread holds a reference. Submitted
// operations are borrowed until they are done.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `peers` by rank; `alive` of this rank's own entry is not used.
  Engine(const View& view, int rank, std::vector<PeerInfo> peers, const EngineOptions& options);
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Collective, unless it is a message: all ranks submit the same collectives in the same order.
  // Blocks only while peers that have started the same operation work on it. After a failure of the
  // group the operation is done at once, with that failure.
  void Submit(EngineOp* op);

  // Blocks until `op` is done and returns its status. DeadlineExceeded if it is not done by
  // `deadline_ns` (of NowNs); the operation then continues.
  absl::Status Wait(EngineOp* op, int64_t deadline_ns);

  // Advances collectives in the calling thread until `done()`, or until none is pending on this
  // rank. `done` must be cheap and must not call the engine: it is called between collectives, also
  // with locks of this class held.
  void Progress(const std::function<bool()>& done);

  // Ends the group: all pending and later operations, on this rank and on the peers, fail with
  // `why`, or with an earlier failure of the group. No operation of this rank is pending when it
  // returns.
  void Abort(const absl::Status& why);

  // Announces that this rank makes no more calls. Its pending operations end with Cancelled. Peers
  // that wait for this rank fail; others do not. Call it once.
  void Leave();

  // OK until the group has failed.
  absl::Status failure() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // These require driving_ to be held.
  void Enqueue();  // takes the submitted operations
  void Take(EngineOp* op);
  bool Advance();  // as far as possible without waiting; true if there was progress
  bool AdvanceCollectives();
  bool idle() const { return collectives_under_way_.empty() && messages_.idle(); }
  void Complete(EngineOp* op, absl::Status status);
  // Advances until `done()`, within the limits of spinning and yielding; returns done(). Returns
  // false early when OthersWait(), and at the deadline.
  template <typename Done>
  bool Spin(const Done& done, int64_t yield_ns,
            int64_t deadline_ns = std::numeric_limits<int64_t>::max());
  // Whether callbacks have to be run, or other threads wait for an operation that has completed.
  bool OthersWait() const;
  // Announces that `who` is about to sleep, then advances once more. False if there was progress.
  bool ReadyToSleep(Sleeper who);
  // Advances until `op` is done or callbacks have to be run; false at the deadline.
  bool Drive(EngineOp* op, int64_t deadline_ns);
  // Requires driving_ not to be held. Waits some milliseconds, or until another thread has made
  // `done()` true.
  void AwaitDriver(const std::function<bool()>& done);
  void CheckFailures();  // failures, deaths, deadlines, mismatches
  void EndAsLeft();      // ends what is pending, except operations that need no peer any more
  void Fail(const absl::Status& cause, bool tell_peers);
  absl::Status Explain(const Request& request, const absl::Status& cause) const;
  absl::Status GoneOrDead(int peer) const;
  absl::Status AnyDeadOrAllGone() const;
  void AwaitPeersWriting() const;
  std::string Missing() const;

  // Releases driving_, wakes the group's thread if operations are pending, and runs callbacks.
  void StopDriving(Lock& lock);

  void PublishFailure(const absl::Status& cause);
  absl::Status PublishedFailure() const;
  void GroupThread();

  const View view_;
  const int rank_;
  const std::vector<PeerInfo> peers_;
  const EngineOptions options_;
  const pid_t owner_;
  const Signals signals_;
  Control& mine_;

  // Operations that were submitted while another thread held driving_.
  std::mutex submit_mutex_;
  std::vector<EngineOp*> submitted_;
  std::atomic<size_t> submitted_count_{0};

  // Held by the one thread that advances the operations ("drives").
  std::mutex driving_;
  Collectives collectives_;
  PointToPoint messages_;
  std::deque<EngineOp*> collectives_under_way_;
  Coroutine coroutine_;              // of the first of them
  std::vector<EngineOp*> finished_;  // whose callbacks are to be run
  bool completed_ = false;           // an operation; waiting threads have not been notified yet
  absl::Status failure_;             // status of every later operation
  int64_t last_check_ns_ = 0;
  // The operation that Submit last left unfinished, and when: its caller may call Wait for it.
  const EngineOp* unfinished_submit_ = nullptr;
  int64_t unfinished_submit_ns_ = 0;
  bool expects_wait_ = false;  // the caller of Submit lately went on to Wait at once
  bool stopped_ = false;       // do not start the group's thread any more
  std::thread group_thread_;

  // Threads in Wait that do not hold driving_.
  std::mutex waiters_mutex_;
  std::condition_variable waiters_;
  std::atomic<int> num_waiters_{0};

  std::atomic<bool> stopping_{false};
  std::atomic<bool> deep_asleep_{false};  // the group's thread sleeps without a time limit
};

}  // namespace ddp::backends::shm
