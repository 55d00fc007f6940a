// State dicts of whole parameters, cut for their pieces, and options of groups: as one number, and
// those of one rank on all.
// Private to zero_redundancy_optimizer.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ddp/zero/flat_parameters.h"
#include "ddp/zero/partition.h"
#include "optim/kind.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/optim/optimizer.h"

namespace ddp::zero {

// Adds to `states`, by number, those of parameters without elements, which have no owner: they have
// been stepped as the others of their group have.
void AddStatesOfEmptyParameters(const FlatParameters& range,
                                std::map<int64_t, optim::Dict>& states);

// InvalidArgument names a parameter of `range` and an entry of `names` in its state that is neither
// a tensor of its shape nor a list of this rank's pieces. `states`: by number.
absl::Status CheckStates(const FlatParameters& range, const std::vector<std::string>& names,
                         const std::vector<std::optional<optim::Dict>>& states);

// The state of one piece, which is the parameter's `index`-th of this rank: of entries in `names`
// its elements, of others the value. Requires CheckStates.
optim::Dict CutState(const optim::Dict& state, const std::vector<std::string>& names,
                     const NumberedParameter& parameter, const Piece& piece, size_t index);

// A hash of the groups' options, equal on ranks whose optimizers step alike: a whole number that a
// double has exactly. 0 for an optimizer of an unknown kind.
double HashOfOptions(const torch::optim::Optimizer& optimizer,
                     const std::vector<torch::optim::OptimizerParamGroup>& groups);

// Collective. Gives all ranks the options of rank `source`. Throws c10::Error on all ranks if one
// has other groups, or if communication fails.
void BroadcastOptions(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      const optim::OptimizerKind& kind,
                      std::vector<torch::optim::OptimizerParamGroup>& groups, int source);

}  // namespace ddp::zero
