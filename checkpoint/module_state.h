// A module's parameters and buffers with the names and order of Python's Module.state_dict().
//
//   state.root.insert("model", ModuleState(*model));
//   DDP_RETURN_IF_ERROR(LoadModuleState(*model, state.root.at("model")));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

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
// lists names that are missing, unexpected or of another shape; the module is then unchanged. If
// all names start with "module.", as in Python's DistributedDataParallel, and the module has no
// such name, the prefix is dropped. Thread-compatible; not collective.
absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state);

}  // namespace ddp::checkpoint
