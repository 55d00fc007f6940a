// Kills ranks at random moments and sees what the others make of it.
//
//   KillReport report = RunKills({.backend = "shm", .kills = 50, .seed = 1});
//   report.failures.empty() && report.slowest < absl::Seconds(0.5)
//
// One round: ranks join as those of a job do, and make random collectives, checked against the
// reference, without end. One of them is killed: by SIGKILL at a random moment, or by itself
// between two collectives. Every survivor's call must end with an error, never with a wrong
// result, that names the dead rank; the survivors then make a new group
// and use it; afterwards no process, no descriptor, and no name
// in /dev/shm is left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "backends/conformance/case.h"

namespace ddp::backends::conformance {

struct KillOptions {
  std::string backend;
  int kills = 50;
  uint64_t seed = 1;
  std::optional<Op> op = {};  // nothing else than this one; otherwise all kinds, in turns and mixed
  // From the death until a survivor's call has ended.
  absl::Duration bar = absl::Seconds(5);
  // Each rank on a host of its own, as far as HostId can tell: as another user. Needs root. Nobody
  // is killed before the ranks have had half a second to exchange their probe addresses.
  bool apart = false;
};

struct KillReport {
  int kills = 0;
  int errors = 0;  // survivors' calls that ended, each in an error
  absl::Duration median;
  absl::Duration slowest;
  std::vector<std::string> failures;  // with the round's seed
};

// Forks; this process must have no other threads. Stops after ten failures.
KillReport RunKills(const KillOptions& options);

// "50 kills, 93 errors of survivors after 1.2ms (median), 8ms (slowest); 0 failures"
std::string Summary(const KillReport& report);

}  // namespace ddp::backends::conformance
