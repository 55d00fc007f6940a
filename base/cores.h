// How many threads of this process can run at the same time.
//
//   at::set_num_threads(std::max(1, AvailableCores() / local_world_size));
#pragma once

#include <optional>

#include "absl/strings/string_view.h"

namespace ddp {

// Number of cores the calling thread may use, at least 1: its CPU affinity (taskset, SLURM,
// cpuset), capped by the CPU quota of its cgroups (docker's --cpus), rounded up. A rank that is
// bound to one core gets 1. Thread-safe; reads a few files in /proc and /sys. `root`, for tests, is
// prepended to their paths.
int AvailableCores(absl::string_view root = "");

// CPU affinity alone, without quotas; at least 1. Thread-safe.
int BoundCores();

// The least CPU quota of this process's cgroups of either version, in cores, above 0; nullopt:
// there is none. `root` and thread safety as above.
std::optional<double> CpuQuota(absl::string_view root = "");

}  // namespace ddp
