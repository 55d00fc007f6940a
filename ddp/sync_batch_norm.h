// Batch normalisation over the batches of all ranks, as torch.nn.SyncBatchNorm, on any device.
//
//   DDP_ASSIGN_OR_RETURN(int layers, ConvertSyncBatchNorm(*model, "torch", group));  // after to()
//   auto ddp = DistributedDataParallel<Net>::Create(model, group);
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/pimpl.h"

namespace ddp {

// From now on the BatchNorm1d, 2d and 3d and SyncBatchNorm1d, 2d and 3d layers in `module`, also
// nested, shared and sequential ones, normalise over the batches of all ranks of `group` when they
// train. Modules are not replaced, so layers that a user's forward calls as members are converted,
// too. The first call registers a kernel for aten::batch_norm, which recognises converted layers by
// their running statistics or, if they have none, by their weight.
//
// These are as in PyTorch:
// - Statistics: over all values of a channel on all ranks; batches may be unequal, also empty.
// - Running statistics are the same on all ranks, with the unbiased variance.
// - Gradients of weight and bias are those of this rank's batch, for DistributedDataParallel to
//   average.
// - In eval mode, and with a group of one rank, layers communicate nothing.
// Mean and variance are combined in double precision, in the order of the ranks: all ranks have the
// same bits. float16 and bfloat16 inputs are normalised in float32.
//
// A rank's batch may have a single value per channel, if the ranks together have more, only in
// SyncBatchNorm1d, 2d and 3d: torch::nn's layers refuse it before they communicate. What
// FailTogether runs then fails on all ranks.
//
// The conversion is not collective, but each training forward of a layer is (one all-gather of 2 C
// + 2 numbers), and each backward in which its input needs a gradient (one all-reduce of 2 C):
// ranks must run the same layers in the same order. Convert the module after its device and dtype
// are final and before it is wrapped; a clone() is not converted.
//
// `implementation`: "torch". `group` is not kept alive. Returns the number of layers; a second call
// changes their group. InvalidArgument, also logged, for another name; InvalidArgument if a layer
// has neither running statistics nor a weight, by which the kernel recognises it. Thread-safe.
absl::StatusOr<int> ConvertSyncBatchNorm(torch::nn::Module& module,
                                         const std::string& implementation,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Whether a layer in `module` is converted. Thread-safe.
bool HasSyncBatchNorm(const torch::nn::Module& module);

// torch::nn::BatchNorm1d, 2d and 3d, until ConvertSyncBatchNorm converts them; then one value per
// channel on a rank is enough. Thread-compatible.
template <size_t D>
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>> {
 public:
  using Base = torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>>;
  using Base::Base;
  // `input`: [N, C, …] with D dimensions more, or, with D = 1, none. Collective as
  // ConvertSyncBatchNorm says.
  at::Tensor forward(const at::Tensor& input);

 protected:
  void _check_input_dim(const at::Tensor& input) override;
};

extern template class SyncBatchNormImpl<1>;
extern template class SyncBatchNormImpl<2>;
extern template class SyncBatchNormImpl<3>;

using SyncBatchNorm1dImpl = SyncBatchNormImpl<1>;
using SyncBatchNorm2dImpl = SyncBatchNormImpl<2>;
using SyncBatchNorm3dImpl = SyncBatchNormImpl<3>;
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

namespace sync_batch_norm_internal {

// Returns if `error` is something else.
void ShareRefusal(const torch::nn::Module& module, const c10::Error& error);

}  // namespace sync_batch_norm_internal

// Returns forward(), a forward of `module`. If a converted layer of torch::nn refuses this rank's
// batch, because it has one value per channel, the other ranks would wait in the layer's
// all-gather: this rank then takes part in it, so that all ranks throw a c10::Error that names the
// layer, the ranks and the remedy. (On an accelerator, only this rank.) DistributedDataParallel and
// the trainer call it around their forwards. Costs nothing otherwise.
template <typename F>
decltype(auto) FailTogether(const torch::nn::Module& module, F&& forward) {
  try {
    return std::forward<F>(forward)();
  } catch (const c10::Error& error) {
    sync_batch_norm_internal::ShareRefusal(module, error);
    throw;
  }
}

}  // namespace ddp
