// An optimizer's state in the layout of Python's Optimizer.state_dict(), for the kinds of
// optimizers that are registered through kind.h:
//
//   {"state": {0: {"momentum_buffer": tensor}, …},
//    "param_groups": [{"lr": 0.1, "momentum": 0.9, …, "params": [0, 1, …]}]}
//
//   DDP_ASSIGN_OR_RETURN(auto optimizer_state, OptimizerState(optimizer));
//   state.root.insert("optimizer", optimizer_state);
//   DDP_RETURN_IF_ERROR(LoadOptimizerState(optimizer, state.root.at("optimizer")));
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optim/kind.h"
#include "torch/optim/optimizer.h"

namespace ddp::optim {

// Can be passed to Python's load_state_dict() of the same kind of optimizer: parameters are
// numbered across all groups, and options that C++ lacks (foreach, maximize, …) have Python's
// defaults. The tensors share memory with the optimizer. InvalidArgument for other kinds of
// optimizers. Functions are thread-compatible and not collective.
absl::StatusOr<Dict> OptimizerState(const torch::optim::Optimizer& optimizer);

// Replaces options and state by those of `state`, as from OptimizerState or Python's state_dict().
// State tensors get the dtype, device and memory layout of their parameters, as in Python. Unknown
// keys are ignored, but maximize=True is refused. InvalidArgument names the group or parameter that
// does not fit (kind of optimizer, number, shape); the optimizer is then unchanged.
absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer, const c10::IValue& state);

// Whether LoadOptimizerState would take `state`: the same errors. Changes nothing, and copies no
// tensor. Of a sharded optimizer with the parameters of the whole model, too.
absl::Status CheckOptimizerState(const torch::optim::Optimizer& optimizer,
                                 const c10::IValue& state);

// The parts of both, for optimizers that hold only a part of each parameter's state.

struct ParsedState {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;  // by group
  // Indexed by the parameter's number through all groups; unset: the parameter has no state.
  std::vector<std::optional<Dict>> states;
};

// A state dict for an optimizer of this kind with these groups. InvalidArgument as
// LoadOptimizerState, but entries of states are not checked.
absl::StatusOr<ParsedState> ParseState(const OptimizerKind& kind,
                                       const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                       const c10::IValue& state);

// The state dict of these groups, with `state_of` each parameter and its number through all groups.
Dict MakeStateDict(const OptimizerKind& kind,
                   const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const std::function<std::optional<Dict>(const at::Tensor& parameter,
                                                           int64_t number)>& state_of);

}  // namespace ddp::optim
