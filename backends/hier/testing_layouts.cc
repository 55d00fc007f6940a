// For tests: `hier` with the ranks of one machine divided into simulated hosts, registered under
// names of their own. To be linked in; communication is over loopback.
//
//   hier_pairs      ranks 0 1 | 2 3 | 4 5 …    with an odd number, the last host has one
//   hier_in_turns   ranks 0 2 4 … | 1 3 5 …    two hosts
//   hier_pairs_over_mpi     as hier_pairs, with mpi between the hosts: under mpirun
#include <string>

#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/hier/hier.h"

namespace ddp::backends::hier {
namespace {

using Result = absl::StatusOr<c10::intrusive_ptr<c10d::Backend>>;

Result CreateOn(const BackendOptions& options, int host, const std::string& cross = "gloo") {
  BackendOptions on_loopback = options;
  if (options.group.interface.empty()) on_loopback.group.hostname = "127.0.0.1";
  HierOptions hier;
  hier.host_id = absl::StrCat("host", host);
  hier.cross = cross;
  return CreateHier(on_loopback, hier);
}

Result CreatePairs(const BackendOptions& options) {
  return CreateOn(options, options.rank.rank / 2);
}

Result CreatePairsOverMpi(const BackendOptions& options) {
  return CreateOn(options, options.rank.rank / 2, "mpi");
}

Result CreateInTurns(const BackendOptions& options) {
  return CreateOn(options, options.rank.rank % 2);
}

const Registration<BackendRegistry> kPairs("hier_pairs", BackendEntry{{"cpu"},
                                                                      &CreatePairs,
                                                                      /*available=*/nullptr});
const Registration<BackendRegistry> kPairsOverMpi("hier_pairs_over_mpi",
                                                  BackendEntry{{"cpu"},
                                                               &CreatePairsOverMpi,
                                                               /*available=*/nullptr});
const Registration<BackendRegistry> kInTurns("hier_in_turns", BackendEntry{{"cpu"},
                                                                           &CreateInTurns,
                                                                           /*available=*/nullptr});

}  // namespace
}  // namespace ddp::backends::hier
