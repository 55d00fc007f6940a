// The state of a ZeroRedundancyOptimizer in checkpoints, without gathering it: each rank gives what
// it holds, and asks for what it will hold, at any world size, partition and stage.
//
//   checkpoint::State state;
//   DDP_RETURN_IF_ERROR(AddShardedState(*optimizer, names, ranks, "optimizer", state));
//   DDP_RETURN_IF_ERROR(manager->Save(name, state).status());
//
//   checkpoint::ReadRequest request;
//   DDP_RETURN_IF_ERROR(RequestShardedState(*optimizer, names, "optimizer", request));
//   DDP_ASSIGN_OR_RETURN(auto loaded, manager->LoadNewest(request));
//   DDP_RETURN_IF_ERROR(LoadShardedState(loaded->state, names, "optimizer", *optimizer));
//
// In a checkpoint the state is that of Python's torch.distributed.checkpoint:
//
//   optimizer/state/fc.weight/step         in State::root
//   optimizer/state/fc.weight/exp_avg      in State::sharded, elements in memory order
//   optimizer/param_groups                 in State::root: [{"lr": …, "params": ["fc.weight", …]}]
//
// `names` are those of the parameters, by their number through all groups; with none, the numbers
// themselves are the keys, as in Python's Optimizer.state_dict(). Both are read from what an
// unsharded optimizer has saved, too. All functions are thread-compatible.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/kind.h"
#include "optim/state_dict.h"

namespace ddp::zero {

using optim::ParameterNames;

// Collective: the ranks tell each other which parameters have state yet. Adds the optimizer's state
// to `state` under `key`, where it must have nothing. Before there is state (a parameter that never
// got a gradient, SGD before its first step) there is none of that parameter. Tensors share their
// memory with the optimizer. With `places`, for a format that rank 0 writes alone, State::root also
// says where each tensor stands (State::sharded): gathered it is that of ConsolidateStateDict, to
// the order of entries and the strides. InvalidArgument: `names` that are not one for each
// parameter, are equal, or have a slash; an optimizer of an unknown kind.
absl::Status AddShardedState(ZeroRedundancyOptimizer& optimizer, const ParameterNames& names,
                             const Coordinator& ranks, const std::string& key,
                             checkpoint::State& state, bool places = false);

// Adds to `request` what this rank needs of such a state: groups and numbers, and its pieces of
// tensors, all but the groups where the checkpoint has them. Which tensors there are follows from
// the options that the optimizer has. Not collective.
absl::Status RequestShardedState(const ZeroRedundancyOptimizer& optimizer,
                                 const ParameterNames& names, const std::string& key,
                                 checkpoint::ReadRequest& request);

// The state that was read, by that request or whole, as LoadStateDict takes it: keys are numbers,
// and in the place of tensors there may be lists of this rank's pieces. A caller may change options
// in it. Parameters are found by name, where the checkpoint has names, or by number.
// InvalidArgument names a parameter that only one of both has, or an entry of another shape. Not
// collective.
absl::StatusOr<optim::Dict> ShardedStateDict(const ZeroRedundancyOptimizer& optimizer,
                                             const checkpoint::State& state,
                                             const ParameterNames& names, const std::string& key);

// ShardedStateDict and LoadStateDict. Not collective.
absl::Status LoadShardedState(const checkpoint::State& state, const ParameterNames& names,
                              const std::string& key, ZeroRedundancyOptimizer& optimizer);

}  // namespace ddp::zero
