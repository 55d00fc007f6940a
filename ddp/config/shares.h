// The share of a machine, its cores and GPUs, of each of several jobs that run on it at once.
//
//   const Machine machine = ThisMachine();
//   const Share share = ShareOf(machine, /*slot=*/0, /*slots=*/2);
//   // {.cores = {0, 4, 1, 5}, .gpus = {"0", "1"}}
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/environment.h"

namespace ddp::config {

// The cores and GPUs that this process may use.
struct Machine {
  // The hardware threads of each physical core, by number (SMT siblings are in one).
  std::vector<std::vector<int>> cores;
  // How many of these threads can run at once: fewer than there are under a CPU quota.
  int available = 0;
  std::vector<std::string> gpus;  // as CUDA_VISIBLE_DEVICES names them
};

struct Share {
  std::vector<int> cores;
  std::vector<std::string> gpus;
};

// Uses the affinity of the calling thread, the topology and quotas in /sys, SLURM's cores per task,
// and CUDA_VISIBLE_DEVICES or, if it is not set, the NVIDIA driver's list in /proc. `root`, for
// tests, is prepended to paths in /sys and /proc. Thread-safe.
Machine ThisMachine(const Environment& env, absl::string_view root = "");

// Slot `slot` of `slots`. Siblings stay together, and under a quota no share has more threads than
// its part of it; one of each physical core comes first. With more slots than cores or GPUs,
// several have the same one. Pure.
Share ShareOf(const Machine& machine, int slot, int slots);

}  // namespace ddp::config
