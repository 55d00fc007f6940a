// Watches the calls of one rank in one group. Its thread wakes up every 100 ms (sometimes 20,
// see kTick); if a call fails or does not complete, it requests reports from the other ranks,
// through the store.
//
//   auto watchdog = c10::make_intrusive<Watchdog>(std::move(options));
//   watchdog->Start();
//   const uint64_t number = watchdog->collectives().Begin(record);
//   … if the call failed: throw watchdog->Explain(std::current_exception(), …);
//   watchdog->Stop();
//
// This class is what callers use. The thread's work is in StatusExchange (reports of the ranks),
// LivenessMonitor (dead ranks), ProgressChecks (slow and different calls) and Investigator (why).
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "backends/watch/call_history.h"
#include "backends/watch/group_state.h"
#include "backends/watch/investigator.h"
#include "backends/watch/liveness_monitor.h"
#include "backends/watch/progress_checks.h"
#include "backends/watch/recorder.h"
#include "backends/watch/status_exchange.h"
#include "backends/watch/watchdog_options.h"
#include "c10/util/intrusive_ptr.h"

namespace ddp::backends::watch {

// Thread-safe. Lives as long as any Work of its group.
class Watchdog : public c10::intrusive_ptr_target {
 public:
  explicit Watchdog(WatchdogOptions options);
  ~Watchdog() override;

  // Call it once, before any other function.
  void Start();
  // Publishes that this rank leaves the group, and ends the thread. `options.abort` is not called
  // afterwards.
  void Stop();
  // Aborts the group on this rank: pending and later calls fail. Then does what Stop does. The
  // caller aborts the inner backend.
  void Abort();

  Recorder& collectives() { return history_.collectives(); }
  // Sends and receives: recorded, never compared between ranks.
  Recorder& messages() { return history_.messages(); }
  void CountMessage(bool sent, int peer) { history_.CountMessage(sent, peer); }

  bool IsTrainingThread() const {
    return options_.training_thread != nullptr && options_.training_thread->IsThisThread();
  }
  // See GroupState. The training thread calls them.
  uint64_t awaited() const { return state_.awaited(); }
  void SetAwaited(uint64_t number) { state_.SetAwaited(number); }

  // Whether the group is aborted.
  bool aborted() const { return state_.aborted(); }
  // The error that `call` ("#17 barrier") throws if the group is aborted.
  std::exception_ptr AbortError(const std::string& call) const;

  // See watch.h.
  std::set<int> DeadRanks();

  // The error to throw instead of `error`, with which `call` has failed. Names the rank that caused
  // it, if that is found within ReplyTimeout (timing.h) or, if a rank on another host does not
  // answer and is not known to have ended, RemoteReplyTimeout. `number`: of the collective; 0 for a
  // message.
  std::exception_ptr Explain(const std::exception_ptr& error, const std::string& call,
                             uint64_t number);

  // Calls `callback` once if the group is aborted, unless RemoveCallback comes first. If the group
  // is aborted already, calls it now.
  uint64_t OnAbort(std::function<void()> callback) { return state_.OnAbort(std::move(callback)); }
  void RemoveCallback(uint64_t id) { state_.RemoveCallback(id); }

 private:
  void Run();
  bool InForkedChild() const;

  WatchdogOptions options_;  // constant, except that `abort` moves to state_
  const int owner_pid_;
  CallHistory history_;
  GroupState state_;

  // Only the thread uses these once it has started.
  LivenessMonitor liveness_;
  StatusExchange exchange_;
  Investigator investigator_;
  ProgressChecks checks_;

  std::thread thread_;
};

}  // namespace ddp::backends::watch
