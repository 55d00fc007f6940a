// Checks that the shards of all ranks together contain each element of each tensor exactly once.
// Does not use torch.
//
//   DDP_RETURN_IF_ERROR(CheckCoverage(PartsOf(state), ranks));
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint {

// Collective. `mine`: this rank's parts by path; a rank need not have every path. InvalidArgument,
// the same on every rank, names a tensor of which some element is on no rank or on two, or whose
// shape, dtype or order differs between ranks; and the errors of Coordinator.
absl::Status CheckCoverage(const std::map<std::string, TensorParts>& mine,
                           const Coordinator& ranks);

// The parts of all ranks of one tensor: those of rank 0, in its order, then those of rank 1, …
struct PartsOfRanks {
  std::string dtype;
  std::vector<RankShard> shards;
};

// Collective. CheckCoverage, and the parts of all ranks on every rank. A rank without any is there
// with an empty range.
absl::StatusOr<std::map<std::string, PartsOfRanks>> GatherParts(
    const std::map<std::string, TensorParts>& mine, const Coordinator& ranks);

}  // namespace ddp::checkpoint
