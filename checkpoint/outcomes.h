// What an operation came to on each rank. Coordinator::Agree gives one error, and cannot be told
// from a failure of the agreement itself, after which ranks may think differently.
//
//   // Collective. An error here: the ranks could not be asked.
//   DDP_ASSIGN_OR_RETURN(Outcomes outcomes, GatherOutcomes(ranks, Write()));
//   const absl::Status failed = FirstFailure(outcomes);  // the same on all ranks
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"

namespace ddp::checkpoint {

// They are indexed by rank. Errors have code and message only, without payloads.
using Outcomes = std::vector<absl::StatusOr<std::string>>;

// Collective.
absl::StatusOr<Outcomes> GatherOutcomes(const Coordinator& ranks,
                                        const absl::StatusOr<std::string>& mine);

// The error of the lowest rank that has one, prefixed with "rank N: " if there are several ranks.
absl::Status FirstFailure(const Outcomes& outcomes);

}  // namespace ddp::checkpoint
