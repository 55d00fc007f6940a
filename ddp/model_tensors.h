// A module's parameters and buffers, as data parallelism sees them, and the check that all ranks
// have the same ones before the first collective on them: a difference could hang the job or
// corrupt results silently.
//
//   DDP_ASSIGN_OR_RETURN(ModelTensors tensors, CollectModelTensors(*module, ignored));
//   DDP_RETURN_IF_ERROR(VerifySameModel(*group, tensors.parameters));
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace torch::nn {
class Module;
}

namespace ddp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct ModelTensors {
  NamedTensors trainable;    // parameters that require a gradient, each once
  NamedTensors reduced;      // of these, the ones whose gradients are averaged
  std::vector<bool> sparse;  // which of `reduced` get a sparse gradient
  NamedTensors parameters;   // all, including frozen ones, except ignored ones
  NamedTensors buffers;      // all except ignored ones
};

// `ignored`: names of parameters and buffers. A tensor with several names is ignored if one of them
// is listed. A gradient is sparse if the parameter is the weight of an Embedding or EmbeddingBag
// with sparse(true). InvalidArgument: the module has no tensor of an ignored name.
// Not collective. Thread-compatible.
absl::StatusOr<ModelTensors> CollectModelTensors(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored);

// The elements that a dense tensor has in memory, as a view: each dimension in which it is expanded
// has size 1. The tensor itself, if there is none.
at::Tensor Stored(const at::Tensor& tensor);

// Collective, and blocks. Thread-compatible. Compares order, names, shapes, dtypes and
// requires_grad of `tensors` with rank 0's, in which dimensions they are expanded, and the strides
// of those that require a gradient: buckets of gradients are laid out by them. FailedPrecondition,
// the same on every rank, describes the first tensor that differs on the lowest rank that differs.
// `mine`: this rank's own error so far, with which it takes part. Ranks with an error return it;
// the others return that of the lowest of these ranks, as "rank N: …", without its payloads. Errors
// of the collective are marked (CatchCollective). Costs one all-gather of 24 bytes per rank if all
// are equal.
absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors,
                             const absl::Status& mine = absl::OkStatus());

}  // namespace ddp
