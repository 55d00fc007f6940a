// What --backend=auto means for CPU tensors, decided once the ranks have met: shm where they share
// one host, hier on several, gloo where the one wanted is not linked, or says that it cannot serve
// here.
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

// What one rank knows that the choice depends on.
struct AutoReport {
  std::string host;  // HostId()
  // Why this program or this machine has no such backend; empty if it has.
  std::string no_shm;
  std::string no_hier;
};

struct AutoChoice {
  std::string backend;
  std::string reason;  // "4 ranks on one host"; of gloo, with what kept from the backend wanted
};

// Pure, so that all ranks choose the same from the same reports, which are in rank order. Not
// empty.
AutoChoice ChooseBackend(const std::vector<AutoReport>& reports);

// Collective where `spec` names kAuto, which it replaces; otherwise nothing is done and the text is
// empty. Waits for the other ranks until `timeout`.
absl::StatusOr<std::string> ResolveAuto(c10d::Store& store, const launchers::Rank& rank,
                                        absl::Duration timeout, BackendSpec& spec);

}  // namespace ddp::backends
