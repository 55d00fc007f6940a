// Chooses the backend of --backend=auto for CPU tensors, after the ranks have joined: shm if they
// share one host, hier if there are several hosts; gloo if that backend is not linked or cannot run
// on some rank.
//
//   BackendSpec spec = *ParseBackendSpec("auto", "cpu");  // {{"cpu", kAuto}}
//   … the ranks exchange HostId() and ReportForAuto(spec) …
//   DDP_ASSIGN_OR_RETURN(std::string choice, ResolveAuto(hosts, reports, spec));
//   // spec == BackendSpec{{"cpu", "shm"}}; choice == "shm (auto: 4 ranks on one host)"
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "backends/spec.h"

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

// Returns what this rank tells the others if `spec` contains kAuto: an AutoReport, without the
// host, as text. Empty otherwise.
std::string ReportForAuto(const BackendSpec& spec);

// Replaces kAuto in `spec` and returns the choice with its reason; an empty text if `spec` does not
// contain it. `hosts` and `reports`: every rank's HostId() and ReportForAuto, by rank. OptionError
// if a rank made no report.
absl::StatusOr<std::string> ResolveAuto(const std::vector<std::string>& hosts,
                                        const std::vector<std::string>& reports, BackendSpec& spec);

}  // namespace ddp::backends
