// Gradient clipping, as torch.nn.utils has it.
//
//   loss.backward();
//   double norm = ddp::clip_grad_norm_(parameters, /*max_norm=*/1.0);
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"

namespace ddp {

// Scales the gradients of `parameters` in place so that their norm, taken as of one vector, is at
// most `max_norm`; returns the norm before. `norm_type`: the p of the p-norm; infinity for the
// maximum. With DistributedDataParallel the gradients are the same on every rank after backward,
// and so is the result: not collective. Factor: max_norm / (norm + 1e-6), at most 1, PyTorch's
// formula. On the CPU the norm is grad_norm.h's, so that ZeroRedundancyOptimizer's own
// clip_grad_norm_ gives the same bits. Throws c10::Error if error_if_nonfinite and the norm is not
// finite, or for a sparse gradient; then nothing is scaled.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

// Limits each element of the gradients to [-clip_value, clip_value], in place. Not collective.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace ddp
