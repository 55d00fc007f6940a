// Checks that the shards of all ranks together contain each element of each tensor exactly once.
// Does not use torch.
//
//   DDP_RETURN_IF_ERROR(CheckCoverage(state.shards, ranks));
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/coordinator.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint {

// Collective. `mine`: this rank's shards by path; a rank need not have every path. InvalidArgument,
// the same on every rank, names a tensor of which some element is on no rank or on two, and the
// errors of Coordinator.
absl::Status CheckCoverage(const std::map<std::string, Shard>& mine, const Coordinator& ranks);

}  // namespace ddp::checkpoint
