// Helpers for Launcher::Detect: integer variables, uniform errors, a sanity check. Thread-safe.
//
//   DDP_ASSIGN_OR_RETURN(std::optional<int> rank, FirstInt(env, {"PMI_RANK"}));
//   if (!rank) return BadEnvironment("PMI_RANK is missing", env, Variables(), "start with mpirun");
//   DDP_RETURN_IF_ERROR(CheckRank(result, env, Variables(), "start with mpirun"));
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"
#include "launchers/rank.h"

namespace ddp::launchers {

// The value of the first of `names` that is set; nullopt if none is. InvalidArgument, naming
// variable and value, if the value is not an integer in [0, max].
absl::StatusOr<std::optional<int>> FirstInt(const Environment& env,
                                            const std::vector<std::string>& names,
                                            int max = 1 << 20);

// InvalidArgument with the problem, the values of those `variables` that are set, and the remedy.
absl::Status BadEnvironment(absl::string_view problem, const Environment& env,
                            const std::vector<std::string>& variables, absl::string_view remedy);

// BadEnvironment if the fields of `rank` contradict each other, such as rank >= world_size.
absl::Status CheckRank(const Rank& rank, const Environment& env,
                       const std::vector<std::string>& variables, absl::string_view remedy);

}  // namespace ddp::launchers
