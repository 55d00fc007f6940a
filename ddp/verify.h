// Do all ranks hold the same model? Checked before the first collective on its tensors, where a
// difference would hang or be summed up silently.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Collective. Compares names, shapes, dtypes and requires_grad of `tensors` with rank 0's, and
// their order. FailedPrecondition, on every rank, names the first tensor that differs on the lowest
// rank that differs, with both sides. One all-gather of 16 bytes when all agree.
absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors);

}  // namespace ddp
