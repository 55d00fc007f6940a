// A module's parameters and buffers, named and ordered as Python's Module.state_dict() does.
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

// Name -> tensor: of each module its own parameters, its own buffers, then its children. Tensors
// share their memory with the module, without autograd: they follow further training until they
// are written or cloned. A tensor registered under two names has two entries.
c10::impl::GenericDict ModuleState(const torch::nn::Module& module);

// Copies `state`, as ModuleState or Python's state_dict() gives it, to the module's tensors, in
// place and converting element types as Tensor.copy_ does. Names must be the same on both sides,
// and shapes per name: InvalidArgument lists what is missing, unexpected or of another shape, and
// nothing has changed then. Names that all start with "module.", as Python's
// DistributedDataParallel leaves them, are taken without it.
absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state);

}  // namespace ddp::checkpoint
