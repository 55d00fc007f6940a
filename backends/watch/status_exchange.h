// One rank's part in the exchange of reports: publishes this rank's report in the group's store,
// answers status requests, and learns from them that another rank has aborted the group.
//
//   StatusExchange exchange(options, history, state, liveness);
//   exchange.Publish(StatusExchange::Detail::kLastCall);
//   while (…) {
//     exchange.ObserveCalls();
//     if (exchange.HeartbeatDue()) exchange.Heartbeat();
//   }
//   exchange.Leave();
#pragma once

#include <cstdint>

#include "backends/watch/call_history.h"
#include "backends/watch/group_state.h"
#include "backends/watch/liveness_monitor.h"
#include "backends/watch/report.h"
#include "backends/watch/report_store.h"
#include "backends/watch/timing.h"
#include "backends/watch/watchdog_options.h"

namespace ddp::backends::watch {

// Not thread-safe: only the watchdog's thread uses it once that has started.
class StatusExchange {
 public:
  enum class Detail {
    kLastCall,
    kAllCalls,  // all collectives that the recorder holds, and the numbers of messages
  };

  // All arguments must outlive this.
  StatusExchange(const WatchdogOptions& options, const CallHistory& history, GroupState& state,
                 LivenessMonitor& liveness);

  ReportStore& store() { return store_; }
  const ReportStore& store() const { return store_; }

  // This rank's report as of now.
  RankReport LocalReport(Detail detail) const;
  void Publish(Detail detail);

  // Reads how many collectives this rank has called. The watchdog's thread calls this in each
  // iteration.
  void ObserveCalls();
  uint64_t observed_count() const { return observed_count_; }

  bool HeartbeatDue() const { return Clock::now() >= next_heartbeat_; }
  // Answers a status request if there is a new one, and publishes a report if it has changed.
  // Returns whether ObserveCalls has seen calls that were not published.
  bool Heartbeat();

  // Answers the latest status request, unless this rank has already done so. Aborts the group if
  // another rank has.
  void AnswerRequests();
  // Asks all ranks for full reports, by a new status request. If `reuse_recent`, a request that
  // this rank has answered a moment ago serves as well. Aborts the group if another rank has.
  void RequestStatus(bool reuse_recent);
  // Number of the latest status request that this rank has answered; 0: none.
  int64_t answered_request() const { return answered_request_; }

  // Whether the processes and probe addresses of some ranks are still unknown. True for at most 10
  // s, because a rank that has ended never reports them.
  bool IsDiscovering() const;

  // Publishes that this rank has left. On rank 0, if it serves the store, then waits until each
  // other rank has left, has failed, or knows why the group is aborted; for 1.4 s at most.
  void Leave();

 private:
  void Answer(int64_t request);

  const WatchdogOptions& options_;
  const CallHistory& history_;
  GroupState& state_;
  LivenessMonitor& liveness_;
  ReportStore store_;
  const Clock::time_point started_;
  RankReport published_;  // the last one, without `tail`
  int64_t answered_request_ = 0;
  Clock::time_point answered_at_;
  uint64_t observed_count_ = 0;
  Clock::time_point observed_at_;  // when observed_count_ last changed
  Clock::time_point next_heartbeat_;
};

}  // namespace ddp::backends::watch
