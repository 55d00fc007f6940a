// Chooses the backend of --backend=auto for CPU tensors, after the ranks have joined: shm if they
// share one host, hier if there are several hosts; gloo if that backend is not linked or cannot run
// on some rank.
//
//   BackendSpec spec = *ParseBackendSpec("auto", "cpu");  // {{"cpu", kAuto}}
//   DDP_ASSIGN_OR_RETURN(std::string choice, ResolveAuto(*store, rank, timeout, spec));
//   // spec == BackendSpec{{"cpu", "shm"}}; choice == "shm (auto: 4 ranks on one host)"
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/spec.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

// Input of one rank to the choice.
struct AutoReport {
  std::string host;  // HostId()
  // Why the backend cannot be used in this program or on this machine; empty if it can.
  std::string no_shm;
  std::string no_hier;
};

struct AutoChoice {
  std::string backend;
  std::string reason;  // "4 ranks on one host"; for gloo, also why not the preferred one
};

// Depends on `reports` only, so that all ranks make the same choice. `reports` is in rank order and
// not empty.
AutoChoice ChooseBackend(const std::vector<AutoReport>& reports);

// Replaces kAuto in `spec` and returns the choice with its reason. Collective if `spec` contains
// kAuto; otherwise it returns an empty text at once. `timeout`: maximum wait for the other ranks.
absl::StatusOr<std::string> ResolveAuto(c10d::Store& store, const launchers::Rank& rank,
                                        absl::Duration timeout, BackendSpec& spec);

}  // namespace ddp::backends
