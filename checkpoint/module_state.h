// A module's parameters and buffers with the names and order of Python's Module.state_dict().
//
//   state.root.insert("model", ModuleState(*model));
//   DDP_RETURN_IF_ERROR(LoadModuleState(*model, state.root.at("model")));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/name_map.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::checkpoint {

// Name -> tensor. Order: each module's own parameters, its own buffers, then its children. The
// tensors are detached but share memory with the module: further training changes them. A tensor
// that is registered under two names has two entries. Thread-compatible; not collective.
c10::impl::GenericDict ModuleState(const torch::nn::Module& module);

// Copies `state`, as from ModuleState or Python's state_dict(), into the module's tensors with
// Tensor.copy_, on whatever device they are, also into expanded ones. Names and shapes must match,
// and dtypes unless both are of floating-point numbers: InvalidArgument lists names that are
// missing, unexpected, of another shape, or that cannot be converted (sparse ones, too); the module
// is then unchanged.
//
// Taken, and said in `notes`, or logged if it is null:
// - Names with the parts "module." and "_orig_mod.", at the start or within, as Python's
//   DistributedDataParallel and torch.compile leave them, if the module has no such names.
// - BatchNorm without num_batches_tracked, which stays as it is.
// - Floating-point numbers of another precision, which are converted to the model's.
//
// Thread-compatible; not collective.
absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state,
                             std::vector<std::string>* notes = nullptr);

// Whether LoadModuleState would take `state`: the same errors. Changes nothing.
absl::Status CheckModuleState(const torch::nn::Module& module, const c10::IValue& state);

// Tensor.copy_, also to a tensor that is expanded, which copy_ refuses: writes each element that it
// has in memory once, from the first of the values that are expanded from it. `values` has its
// sizes. Throws as copy_ does. Thread-compatible.
void CopyValues(const at::Tensor& tensor, const at::Tensor& values);

// The keys under which programs save a model's state_dict(), the likeliest first.
inline constexpr const char* kWeightKeys[] = {"model", "state_dict", "model_state_dict"};

// The dict of weights in the root of a checkpoint of whatever program: what is under the first of
// kWeightKeys that is a dict, or the root itself, if it has tensors. InvalidArgument lists the keys
// that there are instead. Thread-safe.
absl::StatusOr<c10::impl::GenericDict> WeightsIn(const c10::impl::GenericDict& root);

// A module that also takes weights which another program has saved in another form, such as
// transposed. torch::nn::Module is its other base.
class WeightAdapter {
 public:
  virtual ~WeightAdapter() = default;

  // Brings weights, by name, into the form of the module's own state dict; what it does not know it
  // leaves as it is. Adds what is to be said to `notes`. Not collective.
  virtual void AdaptWeights(std::map<std::string, at::Tensor>& weights,
                            std::vector<std::string>& notes) const = 0;
};

struct InitOptions {
  // All that the model has must be in the state, with its shape and a dtype that can be converted,
  // and all that the state has, in the model. False: takes what fits, but not nothing.
  bool strict = true;
  NameMap map = {};
};

// Copies weights, perhaps of another program or of another model, into the module, for a new run;
// returns how many tensors. Names are mapped first; then a module that is a WeightAdapter adapts
// the weights; then what LoadModuleState takes is taken, too. Of tensors that the model has
// under several names one name will do.
//
// `notes` gets what is said: what was converted, and, unless strict, what found no place and what
// keeps its initial value, as numbers and the first ten names. InvalidArgument lists what does not
// fit, and errors of NameMap::Apply; the module is then unchanged. Thread-compatible; not
// collective.
absl::StatusOr<int64_t> InitModule(torch::nn::Module& module, const c10::impl::GenericDict& weights,
                                   const InitOptions& options, std::vector<std::string>& notes);

}  // namespace ddp::checkpoint
