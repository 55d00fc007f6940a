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

// Collective. Compares order, names, shapes, dtypes and requires_grad of `tensors` with rank 0's,
// and the strides of those that require a gradient: buckets of gradients are laid out by them.
// FailedPrecondition, the same on every rank, describes the first tensor that differs on the lowest
// rank that differs. `mine`: this rank's own error so far, with which it takes part. Ranks with an
// error return it; the others return that of the lowest of these ranks, as "rank N: …", without its
// payloads. Errors of the collective are marked (CatchCollective). Costs one all-gather of 24 bytes
// per rank if all are equal.
absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors,
                             const absl::Status& mine = absl::OkStatus());

}  // namespace ddp
