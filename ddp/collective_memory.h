// Memory for tensors that collectives send again and again.
#pragma once

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// An uninitialised tensor of `numel` elements, of no complex dtype, in memory of the group's
// backend if the backend provides memory, otherwise in ordinary memory. `group` may be null.
inline at::Tensor AllocateForCollectives(c10d::ProcessGroup* group, int64_t numel,
                                         const at::TensorOptions& options) {
  if (group != nullptr && options.device().is_cpu()) {
    const auto backend = group->getBackend(options.device().type());
    if (backend->supportsTensorAlloc(options.device().index())) {
      return backend->allocateTensor(numel, options);
    }
  }
  return at::empty({numel}, options);
}

}  // namespace ddp
