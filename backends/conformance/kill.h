// Kills ranks at random moments and checks how the other ranks fail.
//
//   KillReport report = RunKills({.backend = "shm", .kills = 50, .seed = 1});
//   report.failures.empty() && report.slowest < absl::Seconds(0.5)
//
// One round: ranks join a group like the ranks of a job and run random collectives, checked against
// the reference, in an endless loop. One rank is killed: by SIGKILL at a random moment, or by
// itself between two collectives. Each survivor's call must return an error that names the dead
// rank, never a wrong result. The survivors then create and use a new group. At the end no process,
// file descriptor or name in /dev/shm may be left.
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
  std::optional<Op> op = {};  // only this operation; unset: all operations, each alone and mixed
  // Maximum time from the death to the end of each survivor's call.
  absl::Duration max_detection_time = absl::Seconds(5);
  // Each rank runs as another user, so that HostId() differs and the ranks count as being on
  // different hosts. Needs root. The first kill comes after half a second, in which the ranks
  // exchange probe addresses.
  bool separate_hosts = false;
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
