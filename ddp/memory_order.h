// Flat views of tensors in memory order, for any strides (for example channels last).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/as_strided.h"
#include "ATen/ops/empty_like.h"

namespace ddp {

// The dimensions from the slowest to the fastest one in memory.
inline std::vector<int64_t> MemoryOrder(const at::Tensor& tensor) {
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

// The elements of `tensor`, one dimension, in the order in which those of `like`, of the same
// shape, lie in memory: a view where `tensor` has the strides of `like` and no gaps, else a copy.
// Where `like` has gaps or overlaps, the order is that of empty_like(like).
inline at::Tensor FlatInMemoryOrder(const at::Tensor& like, const at::Tensor& tensor) {
  const bool same = tensor.strides() == like.strides() && tensor.is_non_overlapping_and_dense();
  const at::Tensor dense = same ? tensor : at::empty_like(like, tensor.options()).copy_(tensor);
  return at::as_strided(dense, {dense.numel()}, {1});
}

}  // namespace ddp
