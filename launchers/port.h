// A rendezvous port that every rank derives from the job's id, without communication.
//
//   int port = PortFromJob(/*job=*/4711, /*step=*/0);
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ddp::launchers {

// Ports are in [kFirstPort, kFirstPort + kPorts): unprivileged, below Linux's ephemeral range
// (32768-60999, used for outgoing connections) and below Kubernetes' node ports (30000-32767).
inline constexpr int kFirstPort = 20000;
inline constexpr int kPorts = 10000;

// Deterministic. Jobs and steps with nearby numbers, which may share a machine, get different
// ports. Thread-safe.
int PortFromJob(uint64_t job, uint64_t step);

// For job ids that are not numbers: a hash. Two names collide with probability 1 / kPorts.
// Thread-safe.
int PortFromName(absl::string_view name);

}  // namespace ddp::launchers
