// Batch normalisation over the batches of all ranks, as torch.nn.SyncBatchNorm, on any device.
//
//   DDP_ASSIGN_OR_RETURN(int layers, ConvertSyncBatchNorm(*model, "torch", group));  // after to()
//   auto ddp = DistributedDataParallel<Net>::Create(model, group);
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace ddp {

// From now on the BatchNorm1d, 2d and 3d layers in `module`, also nested, shared and sequential
// ones, normalise over the batches of all ranks of `group` when they train. Modules are not
// replaced, so layers that a user's forward calls as members are converted, too. The first call
// registers a kernel for aten::batch_norm, which recognises converted layers by their running
// statistics or, if they have none, by their weight.
//
// As in PyTorch:
// - Statistics: over all values of a channel on all ranks; batches may be unequal, also empty.
// - Running statistics are the same on all ranks, with the unbiased variance.
// - Gradients of weight and bias are those of this rank's batch, for DistributedDataParallel to
//   average.
// - In eval mode, and with a group of one rank, layers communicate nothing.
// Mean and variance are combined in double precision, in the order of the ranks: all ranks have the
// same bits. float16 and bfloat16 inputs are normalised in float32. Unlike in PyTorch, a batch with
// exactly one value per channel is an error of torch::nn.
//
// Not collective, but each training forward of a layer is (one all-gather of 2 C + 1 numbers), and
// each backward in which its input needs a gradient (one all-reduce of 2 C): ranks must run the
// same layers in the same order. Convert the module after its device and dtype are final and before
// it is wrapped; a clone() is not converted.
//
// `implementation`: "torch". `group` is not kept alive. Returns the number of layers; a second call
// changes their group. InvalidArgument, also logged, for another name; InvalidArgument if a layer
// has neither running statistics nor a weight, by which the kernel recognises it. Thread-safe.
absl::StatusOr<int> ConvertSyncBatchNorm(torch::nn::Module& module,
                                         const std::string& implementation,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Whether a layer in `module` is converted. Thread-safe.
bool HasSyncBatchNorm(const torch::nn::Module& module);

}  // namespace ddp
