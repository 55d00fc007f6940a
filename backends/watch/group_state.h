// State of a watched group that is shared by the callers' threads and the watchdog's thread:
// whether the group is aborted, whether the watchdog is to stop, and failed calls that wait for an
// explanation.
//
//   GroupState state(abort_messages, abort_backend);
//   std::string reason = state.Explain("#17 barrier", "Connection closed", 17);  // caller
//   for (const auto& call : state.TakeFailedCalls()) …;                          // watchdog
//   state.AbortGroup("rank 2 has died");                                         // watchdog
//   state.RequestDeadRanks();                                                    // caller
//   if (state.wants_dead_ranks()) state.SetDeadRanks({2});                       // watchdog
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "backends/watch/timing.h"

namespace ddp::backends::watch {

// Thread-safe. Calls no function of its users while it holds its lock.
class GroupState {
 public:
  // A failed call that waits for its explanation.
  struct FailedCall {
    uint64_t number = 0;
    bool explained = false;
    std::string explanation;
  };

  // AbortGroup calls these in this order, once at most. They must not throw. Null: nothing to do.
  GroupState(std::function<void()> abort_messages, std::function<void()> abort_backend);

  // ---- Abort of the group. Final.

  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Empty if not aborted.
  std::string abort_reason() const;
  // The first call's reason counts; later calls do nothing.
  void AbortGroup(std::string reason);
  // A later AbortGroup does not abort the backend. Releases what that function holds.
  void ReleaseBackend();
  // AbortGroup calls `callback` once, unless RemoveCallback comes first. If the group is aborted
  // already, calls it now and returns 0.
  uint64_t OnAbort(std::function<void()> callback);
  void RemoveCallback(uint64_t id);

  // ---- Failed calls.

  // Waits until the watchdog's thread has explained the failure, for 3 s at most. Returns the
  // explanation, or if the group is aborted the reason for that. Empty: none was found. `number`:
  // of the collective; 0 for a message.
  std::string Explain(const std::string& call, const std::string& error, uint64_t number);
  bool has_failed_calls() const;
  std::vector<std::shared_ptr<FailedCall>> TakeFailedCalls();
  void SetExplanation(const std::vector<std::shared_ptr<FailedCall>>& calls,
                      const std::string& explanation);
  // Call and error of the first collective that failed; empty: none.
  std::string first_failure() const;

  // ---- Dead ranks, for a caller that waits for other ranks outside of the group's calls.

  // The latest SetDeadRanks. Has the watchdog's thread look for dead ranks for 10 s more.
  std::set<int> RequestDeadRanks();
  bool wants_dead_ranks() const;
  std::set<int> dead_ranks() const;
  void SetDeadRanks(std::set<int> ranks);

  // ---- The collective that the training thread waits for: now, or at the end of the backward pass
  // that it is in. 0: none. It may have ended since. Only the training thread writes it.

  uint64_t awaited() const { return awaited_.load(std::memory_order_acquire); }
  void SetAwaited(uint64_t number) { awaited_.store(number, std::memory_order_release); }

  // ---- Life of the watchdog's thread.

  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  // False if it was called before.
  bool RequestStop();
  void SetThreadEnded();
  // False if the thread has not ended within `timeout`.
  bool AwaitThreadEnd(absl::Duration timeout);
  // The thread waits for `duration`, or until there is a failed call or it is to stop.
  void AwaitWork(absl::Duration duration);
  // The thread waits for `duration`, or until it is to stop.
  void AwaitStop(absl::Duration duration);

 private:
  const std::function<void()> abort_messages_;
  std::atomic<bool> aborted_{false};   // written under mutex_
  std::atomic<bool> stopping_{false};  // written under mutex_
  std::atomic<uint64_t> awaited_{0};

  // Guards all below.
  mutable std::mutex mutex_;
  std::condition_variable wake_;     // for the watchdog's thread
  std::condition_variable changed_;  // for threads that wait for it
  std::function<void()> abort_backend_;
  std::string abort_reason_;
  uint64_t next_callback_ = 1;
  std::map<uint64_t, std::function<void()>> callbacks_;
  std::string first_failure_;
  std::vector<std::shared_ptr<FailedCall>> failed_calls_;
  Clock::time_point dead_ranks_wanted_until_;
  std::set<int> dead_ranks_;
  bool thread_ended_ = false;
};

}  // namespace ddp::backends::watch
