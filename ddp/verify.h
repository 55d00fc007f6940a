// Checks that all ranks have the same model, before the first collective on its tensors: a
// difference could hang the job or corrupt results silently.
//
//   DDP_RETURN_IF_ERROR(VerifySameModel(*group, tensors));
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Collective. Compares order, names, shapes, dtypes and requires_grad of `tensors` with rank 0's.
// FailedPrecondition, the same on every rank, describes the first tensor that differs on the lowest
// rank that differs. Costs one all-gather of 16 bytes per rank if all are equal.
absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors);

}  // namespace ddp
