// Backend `hier`: groups that span hosts. Ranks of one host use shared memory; data is sent only
// once from one host to another, by one rank of the one to one rank of the other.
//
//   DDP_ASSIGN_OR_RETURN(auto backend, CreateHier(options, {}));
//   backend->allreduce(tensors)->wait();
//
// Composed of two other backends, by their registered names: `local` among the ranks of a host,
// `cross` between hosts. On a single host the group is a `local` one, with a single rank per host a
// `cross` one. Hosts may have different numbers of ranks, in any order.
//
// Results are bit-identical on all ranks and in all runs: contributions are added up inside each
// host first, then in the order of hosts.
#pragma once

#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "backends/hier/options.h"

namespace ddp::backends::hier {

// Collective. OptionError for wrong options, with a path relative to GroupOptions ("hier.cross");
// its code is NotFound if a part's backend is not linked in. DeadlineExceeded if a rank does not
// join within options.group.join_timeout. Otherwise the errors of the parts' factories, with the
// name of the part.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateHier(const BackendOptions& options,
                                                             const HierOptions& hier);

}  // namespace ddp::backends::hier
