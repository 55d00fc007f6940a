// An optimizer's state in the layout of Python's Optimizer.state_dict(), for SGD, Adam, AdamW and
// optimizers that derive from them or use their option and state types:
//
//   {"state": {0: {"momentum_buffer": tensor}, …},
//    "param_groups": [{"lr": 0.1, "momentum": 0.9, …, "params": [0, 1, …]}]}
//
//   DDP_ASSIGN_OR_RETURN(auto optimizer_state, OptimizerState(optimizer));
//   state.root.insert("optimizer", optimizer_state);
//   DDP_RETURN_IF_ERROR(LoadOptimizerState(optimizer, state.root.at("optimizer")));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp::checkpoint {

// Can be passed to Python's load_state_dict() of the same kind of optimizer: parameters are
// numbered across all groups, and options that C++ lacks (foreach, maximize, …) have Python's
// defaults. The tensors share memory with the optimizer. InvalidArgument for other kinds of
// optimizers. Functions are thread-compatible and not collective.
absl::StatusOr<c10::impl::GenericDict> OptimizerState(const torch::optim::Optimizer& optimizer);

// Replaces options and state by those of `state`, as from OptimizerState or Python's state_dict().
// State tensors get the dtype, device and memory layout of their parameters, as in Python. Unknown
// keys are ignored, but maximize=True is refused. InvalidArgument names the group or parameter that
// does not fit (kind of optimizer, number, shape); the optimizer is then unchanged.
absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer, const c10::IValue& state);

}  // namespace ddp::checkpoint
