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
#include <string>
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
// tensor. The optimizer may be a sharded one with the parameters of the whole model, too.
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

// Gives the groups the options of `parsed`, which is of ParseState for them. The groups keep their
// option objects, so that references to them, such as a schedule's, stay valid.
void SetOptions(const OptimizerKind& kind, const ParsedState& parsed,
                std::vector<torch::optim::OptimizerParamGroup>& groups);

// The state dict of these groups, with `state_of` each parameter and its number through all groups.
Dict MakeStateDict(const OptimizerKind& kind,
                   const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const std::function<std::optional<Dict>(const at::Tensor& parameter,
                                                           int64_t number)>& state_of);

// Names in the place of numbers, as Python's torch.distributed.checkpoint has them: they say which
// parameter a state is of, also where a model has got more of them.

using ParameterNames = std::vector<std::string>;  // by number, through all groups

// `state`, of OptimizerState, with names as the keys of 'state' and in 'params'. Requires a name
// for each parameter, all different.
Dict WithNames(const Dict& state, const ParameterNames& names);

// `state`, of OptimizerState, whose groups have 'param_names', as Python's optimizers of named
// parameters have them: they say what the numbers mean. Requires a name for each parameter.
Dict WithParamNames(const Dict& state, const ParameterNames& names);

// Saved groups for an optimizer with `groups`: 'params' are its numbers. `keys` has, by number,
// what the checkpoint calls the parameter: its name, or the number that it had. Where `names` is
// empty, or the checkpoint has numbers, parameters are found by their places in the groups.
// InvalidArgument: the groups do not fit, or have no parameter of a name.
struct NumberedGroups {
  c10::impl::GenericList groups{c10::AnyType::get()};
  std::vector<std::string> keys;
};
absl::StatusOr<NumberedGroups> NumberGroups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const c10::IValue& saved,
    const ParameterNames& names);

// The reverse of WithNames, for an optimizer with `groups`. A state that has numbers, or none of
// the form of a state, is returned as it is. Errors of NumberGroups; InvalidArgument for numbers of
// an optimizer with several groups whose 'param_names' are not `names`.
absl::StatusOr<Dict> WithNumbers(const Dict& state,
                                 const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                 const ParameterNames& names);

}  // namespace ddp::optim
