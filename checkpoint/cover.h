// Whether what the ranks hold makes up each tensor exactly once. Free of torch.
//
//   DDP_RETURN_IF_ERROR(CheckCoverage(state.shards, ranks));
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/coordinator.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint {

// Collective. `mine` has by path what this rank holds; a rank may lack a path. InvalidArgument, the
// same on every rank, names a tensor of which some element is on no rank or on two. Thread-safe.
absl::Status CheckCoverage(const std::map<std::string, Shard>& mine, const Coordinator& ranks);

}  // namespace ddp::checkpoint
