// The state of optimizers of one kind: how their options and their state per parameter are named in
// Python's Optimizer.state_dict(), and which entries of the state have one element per element of
// the parameter. Checkpoints, sharded optimizers and memory plans use it.
//
//   DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, KindOf(optimizer));
//   kind->name();                                        // "AdamW"
//   kind->PerElement(optimizer.defaults());              // {"exp_avg", "exp_avg_sq"}
//
// Adagrad, Adam, AdamW, RMSprop and SGD are here, and what derives from them or uses their option
// and state types. Others are registered by their authors, in a target with alwayslink = True:
//
//   const Registration<OptimizerKindRegistry> kLamb("LAMB", &MakeLambKind);
//
// OptimizerFactory creates an optimizer from parameter groups, for code that chooses the tensors
// later:
//
//   const OptimizerFactory make = FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
//   std::unique_ptr<torch::optim::Optimizer> optimizer = make({OptimizerParamGroup(parameters)});
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/registry.h"
#include "torch/optim/optimizer.h"

namespace ddp::optim {

using Dict = c10::impl::GenericDict;

// Stateless. Thread-safe.
class OptimizerKind {
 public:
  virtual ~OptimizerKind() = default;

  // Name of the Python class.
  virtual absl::string_view name() const = 0;
  // Whether an optimizer with these options is of this kind.
  virtual bool Is(const torch::optim::OptimizerOptions& options) const = 0;
  // Whether `group`, an entry of Python's param_groups, can be of this kind.
  virtual bool MatchesGroup(const Dict& group) const = 0;

  // Entries of a parameter's state, by Python's names, that have the parameter's shape, once a step
  // has been taken with these options; in order.
  virtual std::vector<std::string> PerElement(
      const torch::optim::OptimizerOptions& options) const = 0;
  // Entries that are one number per parameter.
  virtual std::vector<std::string> Scalars() const = 0;
  // Whether an element's update depends only on its own gradient, state and value. Otherwise (a
  // norm of the tensor) only whole tensors can be given to different ranks.
  virtual bool elementwise() const { return true; }

  // Adds the options to `group`, under Python's names.
  virtual void WriteOptions(const torch::optim::OptimizerOptions& options, Dict& group) const = 0;
  // Puts what `group` says into `options`. InvalidArgument: a key is missing or of another type.
  virtual absl::Status ReadOptions(const Dict& group,
                                   torch::optim::OptimizerOptions& options) const = 0;

  // The state under Python's names; tensors share their memory with it. Unset if the optimizer
  // keeps nothing for this parameter, in Python's terms.
  virtual std::optional<Dict> WriteState(const torch::optim::OptimizerParamState& state) const = 0;
  // The reverse: tensors are copied, in the element type, device and memory layout of `parameter`,
  // whose shape they must have. Null if the optimizer keeps nothing for this parameter, in C++
  // terms. InvalidArgument: an entry is missing or of another shape.
  virtual absl::StatusOr<std::unique_ptr<torch::optim::OptimizerParamState>> ReadState(
      const Dict& dict, const at::Tensor& parameter,
      const torch::optim::OptimizerOptions& options) const = 0;
};

struct OptimizerKindTag {
  static constexpr absl::string_view kWhat = "kind of optimizer";
};
using OptimizerKindRegistry = Registry<const OptimizerKind* (*)(), OptimizerKindTag>;

// The kind of all of the optimizer's parameter groups. InvalidArgument, with the registered kinds,
// if there is none.
absl::StatusOr<const OptimizerKind*> KindOf(const torch::optim::Optimizer& optimizer);

// Groups that come with options keep these; the others get the factory's.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup> groups)>;

template <typename Optimizer, typename Options>
OptimizerFactory FactoryOf(Options options) {
  return [options](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

// Implementations of OptimizerKind use the functions below.

// An empty dict with keys of type str.
Dict NewDict();
// An error about a state: "optimizer state: …".
absl::Status StateError(absl::string_view what);
// The number may be a 0-dim tensor, as Python has it for steps and, under capturable, for learning
// rates.
std::optional<double> AsNumber(const c10::IValue& value);
std::optional<c10::IValue> Find(const Dict& dict, const char* key);
absl::StatusOr<c10::IValue> Need(const Dict& dict, const char* key);
absl::StatusOr<double> Number(const Dict& dict, const char* key);
absl::StatusOr<bool> Flag(const Dict& dict, const char* key);
// A number of steps, as Python has it: a 0-dim tensor or a number.
absl::StatusOr<int64_t> Steps(const Dict& dict);
// A copy of the tensor under `key` in the parameter's element type, device and memory layout.
absl::StatusOr<at::Tensor> TensorLike(const at::Tensor& parameter, const Dict& dict,
                                      const char* key);

}  // namespace ddp::optim
