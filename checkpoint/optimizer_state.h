// An optimizer's state in the layout of Python's Optimizer.state_dict(), for SGD, Adam and AdamW
// and for what derives from them or uses their option and state types:
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

// Python's load_state_dict() of the same kind of optimizer takes it: parameters are numbered
// through all groups, and options that C++ lacks (foreach, maximize, …) have Python's defaults.
// Tensors share their memory with the optimizer. InvalidArgument for other kinds of optimizers.
absl::StatusOr<c10::impl::GenericDict> OptimizerState(const torch::optim::Optimizer& optimizer);

// Replaces options and state by those of `state`, as OptimizerState or Python's state_dict() gives
// it; element types and memory layout become those of the parameters, as in Python. Keys that have
// no meaning here are ignored, except maximize=True. InvalidArgument says which group or parameter
// differs (kind of optimizer, number, shape), and nothing has changed then.
absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer, const c10::IValue& state);

}  // namespace ddp::checkpoint
