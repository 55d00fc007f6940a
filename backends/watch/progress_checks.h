// Checks whether this rank's calls make progress, and starts an investigation if they do not, or if
// the ranks' calls differ. Reports stalls in the log.
//
//   ProgressChecks checks(options, history, state, liveness, exchange, investigator);
//   while (…) {
//     checks.Observe();
//     checks.CheckPending();
//   }
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "backends/watch/call_history.h"
#include "backends/watch/group_state.h"
#include "backends/watch/investigator.h"
#include "backends/watch/liveness_monitor.h"
#include "backends/watch/status_exchange.h"
#include "backends/watch/timing.h"
#include "backends/watch/watchdog_options.h"

namespace ddp::backends::watch {

// Not thread-safe.
class ProgressChecks {
 public:
  // All arguments must outlive this.
  ProgressChecks(const WatchdogOptions& options, CallHistory& history, GroupState& state,
                 const LivenessMonitor& liveness, StatusExchange& exchange,
                 Investigator& investigator);

  // Finds the oldest collective and the oldest message that are pending, and whether they may be
  // waiting for a dead rank. The watchdog's thread calls this in each iteration.
  void Observe();

  // The value is that of the last Observe. It is also true while a caller waits for ranks outside
  // of the group's calls.
  bool IsWaitLong() const;
  bool AwaitsDeadRank() const { return dead_since_.has_value(); }

  // Investigates if a pending call is slow or may be waiting for a dead rank, and reports it if it
  // stalls. The caller must not call this once the group is aborted.
  void CheckPending();

  // Finds dead ranks for a caller that waits for them outside of the group's calls, if there is one
  // (GroupState::RequestDeadRanks). The watchdog's thread calls this in each iteration.
  void FindDeadRanks();

  // Called at each heartbeat; one rank does the check for all. Investigates if ranks have made
  // different calls or, with backends whose completion is not visible (NCCL), if some ranks lag
  // behind. `advanced`: whether this rank has made calls since the last heartbeat. The caller
  // must not call this once the group is aborted.
  void CompareRanks(bool advanced);

 private:
  // The oldest call that is pending, and what has been done about it.
  struct Tracked {
    uint64_t number = 0;  // 0: none
    Clock::time_point since;
    bool compared = false;      // with the other ranks' calls
    bool checked_dead = false;  // whether it waits for a dead rank
    bool reported = false;      // as a stall
  };
  static void Track(const std::optional<CallHistory::Call>& oldest, Clock::time_point now,
                    Tracked& tracked);

  void CheckCollective();
  void CheckMessage();
  void CheckRound();
  // Checks that the numbers of collectives called by the ranks do not differ for long, for backends
  // whose completion is not visible (NCCL).
  void CheckLag();

  bool IsWaitingForDeadRank() const;
  // Whether the grace period after a rank's death is over.
  bool DeadRankIsDue() const;
  absl::Duration DeadReplyTimeout() const;
  bool IsStall(absl::Duration age) const;
  void ReportStall(uint64_t number, absl::Duration age, const std::string& text);
  // Says, for a stalled message, how many of them each side has called.
  std::string MessageCounts(const CallRecord& record) const;

  const WatchdogOptions& options_;
  CallHistory& history_;
  GroupState& state_;
  const LivenessMonitor& liveness_;
  StatusExchange& exchange_;
  Investigator& investigator_;
  Tracked collective_;
  Tracked message_;
  CallRecord message_record_;
  Tracked round_;  // the Coordinator call that the training thread waits in
  Tracked lag_;    // the first collective that not all ranks have called
  std::optional<Clock::time_point> dead_since_;
};

}  // namespace ddp::backends::watch
