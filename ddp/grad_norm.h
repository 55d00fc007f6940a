// The norm of gradients. The result is bit-identical for any partition of the elements over any
// number of ranks.
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
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"

namespace ddp {

// Elements [begin, end) of a tensor of `numel` elements. `begin` is a multiple of the unit, as is
// `end` unless it is `numel`.
struct NormSegment {
  int tensor = 0;
  int64_t numel = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // On the rank that has them: a dense tensor of floating point, on the CPU, whose elements are
  // these in memory order. Undefined on the others.
  at::Tensor values = {};
  int64_t element_bytes = 4;  // the same on all ranks, as is all but `values`
};

// `segments` cover each tensor, in ascending order, without gaps. `combine` replaces `partial`
// (double, one dimension, on the CPU; each element is set on one rank and 0 on the others) by its
// sum over all ranks; null if this rank has every segment. `norm_type`: the p of the p-norm;
// infinity for the maximum; 0 counts elements that are not 0. Collective if `combine` is.
double BlockedNorm(const std::vector<NormSegment>& segments, double norm_type,
                   const std::function<void(at::Tensor& partial)>& combine = nullptr);

// The factor by which clipping scales gradients whose norm is `norm`: max_norm / (norm + 1e-6), at
// most 1; NaN if the norm is (PyTorch's clip_grad_norm_).
double ClipFactor(double norm, double max_norm);

}  // namespace ddp
