// A module's parameters and buffers with the names and order of Python's Module.state_dict().
//
//   state.root.insert("model", ModuleState(*model));
//   DDP_RETURN_IF_ERROR(LoadModuleState(*model, state.root.at("model")));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::checkpoint {

// Name -> tensor. Order: each module's own parameters, its own buffers, then its children. The
// tensors are detached but share memory with the module: further training changes them. A tensor
// that is registered under two names has two entries. Thread-compatible; not collective.
c10::impl::GenericDict ModuleState(const torch::nn::Module& module);

// Copies `state`, as from ModuleState or Python's state_dict(), into the module's tensors with
// Tensor.copy_, which converts dtypes and devices. Names and shapes must match: InvalidArgument
// lists names that are missing, unexpected, of another shape, or that copy_ cannot convert (sparse,
// or complex to real); the module is then unchanged.
//
// Taken, and said in `notes`, or logged if it is null:
// - Names with the parts "module." and "_orig_mod.", at the start or within, as Python's
//   DistributedDataParallel and torch.compile leave them, if the module has no such names.
// - BatchNorm without num_batches_tracked, which stays as it is.
//
// Thread-compatible; not collective.
absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state,
                             std::vector<std::string>* notes = nullptr);

// Whether LoadModuleState would take `state`: the same errors. Changes nothing.
absl::Status CheckModuleState(const torch::nn::Module& module, const c10::IValue& state);

}  // namespace ddp::checkpoint
