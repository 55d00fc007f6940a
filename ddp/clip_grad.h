// Gradient clipping, as torch.nn.utils.clip_grad_norm_, and the norm behind it.
//
//   loss.backward();
//   double norm = ddp::clip_grad_norm_(parameters, /*max_norm=*/1.0);
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"

namespace ddp {

// Scales the gradients of `parameters` in place so that the norm of all of them, as one vector, is
// at most `max_norm`. Returns the norm before scaling, 0 if no parameter has a gradient. Parameters
// without a gradient are skipped, and one that is listed twice, as C++'s parameters() lists a
// shared one, counts once; gradients must be dense. `norm_type`: the p of the p-norm; infinity for
// the maximum norm. The factor is min(1, max_norm / (norm + 1e-6)), as in PyTorch; an infinite
// max_norm asks for the norm alone, and leaves the gradients as they are whatever it is.
//
// Not collective: with DistributedDataParallel the gradients, and so the result, are the same on
// all ranks after backward. On the CPU the norm is BlockedNorm, so that
// ZeroRedundancyOptimizer::clip_grad_norm_ gives the same bits. Thread-compatible. Throws
// c10::Error, before scaling, if error_if_nonfinite and the norm is not finite.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

// Limits each element of the gradients to [-clip_value, clip_value], in place. Not collective.
// Thread-compatible. Throws c10::Error, before it changes any, if one is complex.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

// The norm of gradients, below, is bit-identical for any partition of the elements over any number
// of ranks.
//
//   std::vector<NormSegment> segments;               // rank 0 of two has the first 512 elements
//   segments.push_back({.tensor = 0, .numel = 1000, .begin = 0, .end = 512, .values = mine});
//   segments.push_back({.tensor = 0, .numel = 1000, .begin = 512, .end = 1000});
//   const double norm = BlockedNorm(segments, 2.0, &AllReduceSums);
//
// A tensor's elements, in memory order, make up units of 64 bytes. In each, 8 lanes add up the
// terms |x|^p of every 8th element in double precision. Units are added pairwise, as the leaves of
// a binary tree over [0, 2^k) units; missing ones count 0. A rank that has some of the units sends
// the largest complete subtrees of them; all ranks finish the tree. At its root the lanes are added
// pairwise, then the tensors in their order.

// Elements [begin, end) of a tensor of `numel` elements. `begin` is a multiple of the unit, as is
// `end` unless it is `numel`.
struct NormSegment {
  int tensor = 0;
  int64_t numel = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // The rank that has them gives a dense tensor of floating point, on the CPU, whose elements are
  // these in memory order. It is undefined on the others.
  at::Tensor values = {};
  int64_t element_bytes = 4;  // the same on all ranks, as is all but `values`
};

// `segments` cover each tensor, in ascending order, without gaps. `combine` replaces `partial`
// (double, one dimension, on the CPU; each element is set on one rank and 0 on the others) by its
// sum over all ranks; null if this rank has every segment. `norm_type`: the p of the p-norm;
// infinity for the maximum; 0 counts elements that are not 0. Collective if `combine` is.
// Thread-compatible.
double BlockedNorm(const std::vector<NormSegment>& segments, double norm_type,
                   const std::function<void(at::Tensor& partial)>& combine = nullptr);

// The norm of gradients, or of this rank's parts of them, on any device and of any dtype. Unlike
// BlockedNorm's, its last bits depend on the partition. `combine` replaces `partial` (double, one
// element, on `device`) by its sum over all ranks or, for an infinite norm_type, its maximum; null
// if this rank has all. Collective if `combine` is. Thread-compatible.
double DeviceNorm(const std::vector<at::Tensor>& gradients, double norm_type, c10::Device device,
                  const std::function<void(at::Tensor& partial)>& combine = nullptr);

// The factor by which clipping scales gradients whose norm is `norm`: max_norm / (norm + 1e-6), at
// most 1; NaN if the norm is (PyTorch's clip_grad_norm_); 1 if max_norm is infinite. Not
// collective. Thread-safe.
double ClipFactor(double norm, double max_norm);

}  // namespace ddp
