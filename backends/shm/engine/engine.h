// Runs the operations of one rank of a shared-memory group: collectives in the order submitted,
// messages as they come.
//
//   auto engine = std::make_shared<Engine>(view, rank, std::move(peers), EngineOptions{});
//   engine->Submit(&op);  // starts it, and finishes it if the peers are there
//   absl::Status status = engine->Wait(&op, deadline_ns);
//   engine->Leave();
//
// Who does the work: whichever thread has time. Submit goes as far as the peers have come, waiting
// for them some microseconds at most; a thread in Wait goes on from there; and where nobody waits,
// the group's own thread does, woken by the peers' progress and by nothing else. So a blocking
// collective never changes threads, and an asynchronous one needs nobody.
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
#include "backends/shm/engine/engine_op.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/point_to_point.h"
#include "backends/shm/engine/signals.h"
#include "backends/shm/engine/task.h"

namespace ddp::backends::shm {

int64_t NowNs();  // of the monotonic clock

// What the engine knows of another rank besides the segment.
struct PeerInfo {
  std::string name;             // for messages: "rank 3 (pid 4711)"
  std::function<bool()> alive;  // cheap and thread-safe; null: always
};

struct EngineOptions {
  // How long a thread spins for a peer. With more ranks than cores a spinning thread keeps the very
  // rank from running that it waits for: then 0.
  int64_t spin_ns = 2500;
  // How long a thread in Wait then goes on looking, with a yield in between, before it sleeps.
  // Ranks that train come to a collective some hundred microseconds apart, and one that sleeps has
  // to be woken by the last to come: that costs both of them more than the yields do, which give
  // the core to whoever has work.
  int64_t wait_yield_ns = 2'000'000;
  // The same in Submit, whose caller may have other things to do; only if it lately had not. Longer
  // than it takes to wake a thread, or ranks that once had to wake each other would do so for ever.
  int64_t submit_yield_ns = 20'000;
  // Whether peers may read this rank's memory; if one rank says no, none does.
  bool direct = true;
};

// Thread-safe. Lives in a shared_ptr, part of which its own thread has. What is submitted is
// borrowed until it is done.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `peers` by rank; the own entry's `alive` is not asked.
  Engine(const View& view, int rank, std::vector<PeerInfo> peers, const EngineOptions& options);
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes the operation into the order of this rank's calls. Blocks no longer than peers that are
  // at it need. After a failure the operation is done at once, with that failure.
  void Submit(EngineOp* op);

  // Blocks until `op` is done and returns its status; DeadlineExceeded, with the operation still
  // under way, if that is not by `deadline_ns` of the monotonic clock.
  absl::Status Wait(EngineOp* op, int64_t deadline_ns);

  // Advances collectives in the calling thread until `done()`, or until none is under way here.
  // `done` is cheap: it is asked between collectives, perhaps with a lock of this class held.
  void Progress(const std::function<bool()>& done);

  // Ends the group: everything under way and everything to come, here and on the peers, fails with
  // `why`. The first failure of a group is everybody's. When it returns, nothing of this rank is
  // under way any more.
  void Abort(const absl::Status& why);

  // This rank makes no more calls: what is under way here ends with Cancelled, and peers that wait
  // for this rank fail, but nobody else does. To be called once, by the owner.
  void Leave();

  // OK until the group has failed.
  absl::Status failure() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // With driving_ held:
  void Enqueue();  // takes what has been submitted
  void Take(EngineOp* op);
  bool Advance();  // as far as it goes without waiting; true if anything moved
  bool AdvanceCollectives();
  bool idle() const { return collectives_under_way_.empty() && messages_.idle(); }
  void Complete(EngineOp* op, absl::Status status);
  // Advances for as long as that is worth a core, or until `done()`; returns that.
  // False as well when others have to be served, and at the deadline.
  template <typename Done>
  bool Spin(const Done& done, int64_t yield_ns,
            int64_t deadline_ns = std::numeric_limits<int64_t>::max());
  // Callbacks to be run, or threads that wait for what has been completed.
  bool OthersWait() const;
  // Announces that `who` is about to sleep, and has a last look: false if there is something to do.
  bool ReadyToSleep(Sleeper who);
  // Drives until `op` is done or somebody's callback has to be run; false at the deadline.
  bool Drive(EngineOp* op, int64_t deadline_ns);
  // Without driving_ held: some milliseconds, or until the thread that drives has made `done()`
  // true.
  void AwaitDriver(const std::function<bool()>& done);
  void CheckTrouble();  // failures, deaths, deadlines, mismatches
  void EndAsLeft();     // what is under way, but for what is as good as done
  void Fail(const absl::Status& cause, bool tell_peers);
  absl::Status Explain(const Request& request, const absl::Status& cause) const;
  absl::Status GoneOrDead(int peer) const;
  absl::Status AnyDeadOrAllGone() const;
  void AwaitPeersWriting() const;
  std::string Missing() const;

  // Hands over to the group's thread, unlocks, and runs callbacks.
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

  // What has been submitted while another thread drove.
  std::mutex submit_mutex_;
  std::vector<EngineOp*> submitted_;
  std::atomic<size_t> submitted_count_{0};

  // Held by the thread that drives: that advances the operations.
  std::mutex driving_;
  Collectives collectives_;
  PointToPoint messages_;
  std::deque<EngineOp*> collectives_under_way_;
  Task task_;                        // of the first of them
  std::vector<EngineOp*> finished_;  // whose callbacks are to be run
  bool completed_ = false;           // something, which bystanders have not been told
  absl::Status failure_;             // every later operation's
  int64_t last_check_ns_ = 0;
  // What Submit left unfinished last, and when: its caller may come to wait for it.
  const EngineOp* left_ = nullptr;
  int64_t left_ns_ = 0;
  bool patient_ = false;  // callers wait at once
  bool stopped_ = false;  // no group thread is to be started any more
  std::thread group_thread_;

  // Threads in Wait that do not drive.
  std::mutex bystanders_mutex_;
  std::condition_variable bystanders_;
  std::atomic<int> num_bystanders_{0};

  std::atomic<bool> stopping_{false};
  std::atomic<bool> deep_asleep_{false};  // the group's thread sleeps without a time limit
};

}  // namespace ddp::backends::shm
