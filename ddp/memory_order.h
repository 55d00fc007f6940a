// Flat views of tensors in memory order, for any strides (for example channels last).
#pragma once

#include "ATen/core/Tensor.h"
#include "ATen/ops/as_strided.h"
#include "ATen/ops/empty_like.h"

namespace ddp {

// The elements of `tensor`, one dimension, in the order in which those of `like`, of the same
// shape, lie in memory: a view where `tensor` has the strides of `like` and no gaps, else a copy.
// Where `like` has gaps or overlaps, the order is that of empty_like(like).
inline at::Tensor FlatInMemoryOrder(const at::Tensor& like, const at::Tensor& tensor) {
  const bool same = tensor.strides() == like.strides() && tensor.is_non_overlapping_and_dense();
  const at::Tensor dense = same ? tensor : at::empty_like(like, tensor.options()).copy_(tensor);
  return at::as_strided(dense, {dense.numel()}, {1});
}

}  // namespace ddp
