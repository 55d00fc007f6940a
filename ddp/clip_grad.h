// Gradient clipping, as torch.nn.utils.clip_grad_norm_.
//
//   loss.backward();
//   double norm = ddp::clip_grad_norm_(parameters, /*max_norm=*/1.0);
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"

namespace ddp {

// Scales the gradients of `parameters` in place so that the norm of all of them, as one vector, is
// at most `max_norm`. Returns the norm before scaling, 0 if no parameter has a gradient. Parameters
// without a gradient are skipped; gradients must be dense. `norm_type`: the p of the p-norm;
// infinity for the maximum norm. The factor is min(1, max_norm / (norm + 1e-6)), as in PyTorch.
//
// Not collective: with DistributedDataParallel the gradients, and so the result, are the same on
// all ranks after backward. On the CPU the norm is grad_norm.h's, so that
// ZeroRedundancyOptimizer::clip_grad_norm_ gives the same bits. Thread-compatible. Throws
// c10::Error, before scaling, if error_if_nonfinite and the norm is not finite.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

// Limits each element of the gradients to [-clip_value, clip_value], in place. Not collective.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace ddp
