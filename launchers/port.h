// A rendezvous port that all ranks of a job work out by themselves, from what the job is called.
//
//   int port = PortFromJob(/*job=*/4711, /*step=*/0);
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ddp::launchers {

// Ports given out are in [kFirstPort, kFirstPort + kPorts): unprivileged, below Linux's ephemeral
// range (32768-60999, from which the kernel gives ports to anybody's connections) and below
// Kubernetes' node ports (30000-32767).
inline constexpr int kFirstPort = 20000;
inline constexpr int kPorts = 10000;

// Same arguments, same port, on every machine. Jobs and steps of nearby numbers, the ones that may
// share a machine, get different ports.
int PortFromJob(uint64_t job, uint64_t step);

// For job ids that are no numbers. Two names share a port with a chance of 1 in kPorts.
int PortFromName(absl::string_view name);

}  // namespace ddp::launchers
