// Liveness detection in one group: detects which other processes have ended (Peers), and runs the
// listener that ranks on other hosts probe.
//
//   LivenessMonitor liveness(options);
//   liveness.Learn(store.ReadAll());
//   liveness.peers().Dead();
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/watch/peers.h"
#include "backends/watch/probe.h"
#include "backends/watch/report.h"
#include "backends/watch/timing.h"
#include "backends/watch/watchdog_options.h"

namespace ddp::backends::watch {

// Not thread-safe.
class LivenessMonitor {
 public:
  // `options` must outlive this.
  explicit LivenessMonitor(const WatchdogOptions& options);

  Peers& peers() { return peers_; }
  const Peers& peers() const { return peers_; }

  // Learns processes and probe addresses from the ranks' reports. Opens this process's listener
  // when it first sees a rank on another host.
  void Learn(const std::vector<std::optional<RankReport>>& reports);

  // Returns the address of this rank's listener, for its report, or kNoProbeAddress; empty while no
  // rank is remote.
  const std::string& probe_address() const { return probe_address_; }

  // Probes ranks on other hosts if it is time to: each until it was found alive once, and all while
  // this rank waits for others for long. The watchdog's thread calls this regularly.
  void ProbeIfDue(bool is_wait_long);
  // Answers the probes of other ranks. The watchdog's thread calls this regularly.
  void AcceptProbes();

 private:
  const WatchdogOptions& options_;
  Peers peers_;
  ProbeListener* listener_ = nullptr;  // not owned; null: none
  std::string probe_address_;
  Clock::time_point next_probe_;
};

}  // namespace ddp::backends::watch
