// Investigates why a call is slow or has failed: asks all ranks for their status, waits for the
// answers, diagnoses, and aborts the group if the cause is fatal.
//
//   Investigator investigator(options, state, liveness, exchange);
//   investigator.ExplainFailedCalls();
//   Diagnosis diagnosis = investigator.Investigate(/*number=*/17, Symptom::kSlow, timeout);
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "absl/time/time.h"
#include "backends/watch/diagnose.h"
#include "backends/watch/group_state.h"
#include "backends/watch/liveness_monitor.h"
#include "backends/watch/status_exchange.h"
#include "backends/watch/watchdog_options.h"

namespace ddp::backends::watch {

// Not thread-safe.
class Investigator {
 public:
  // All arguments must outlive this.
  Investigator(const WatchdogOptions& options, GroupState& state, LivenessMonitor& liveness,
               StatusExchange& exchange);

  // Finds out why collective `number` is slow or has failed; 0: no collective in particular. Waits
  // for the answers of the other ranks for `timeout` at most. If the cause is fatal, the group is
  // aborted then. Returns kNothing if it already was.
  Diagnosis Investigate(uint64_t number, Symptom symptom, absl::Duration timeout);

  // Ranks whose processes have ended. If a probe was refused, waits for a sign of life for
  // `timeout` at most; nothing if the thread has other work meanwhile. Does not abort the group,
  // unless another rank has.
  std::optional<std::set<int>> FindDeadRanks(absl::Duration timeout);

  // Explains the failed calls that wait for it, if any (GroupState::Explain).
  void ExplainFailedCalls();

 private:
  // The answers of all ranks to the latest status request. Returns when all have answered or are
  // known to be dead, or after `timeout`.
  GroupStatus CollectStatus(Symptom symptom, absl::Duration timeout);
  // Adds the ranks that are dead, and those that have not answered `request`, to `status`.
  void FindUnresponsive(Symptom symptom, int64_t request, GroupStatus& status);

  const WatchdogOptions& options_;
  GroupState& state_;
  LivenessMonitor& liveness_;
  StatusExchange& exchange_;
};

}  // namespace ddp::backends::watch
