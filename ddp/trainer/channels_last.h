// Channels-last memory format (NHWC) for 4-dimensional tensors.
#pragma once

#include "ATen/core/Tensor.h"

namespace ddp::trainer {

// `tensor` [n, c, h, w] in channels-last order, always with channels-last strides; tensors of other
// dimensions are returned unchanged. With one channel both orders have the same bytes, so torch's
// contiguous() keeps the default strides, and the following convolutions would run in the slow
// order.
inline at::Tensor ChannelsLast(const at::Tensor& tensor) {
  if (tensor.dim() != 4) return tensor;
  const at::Tensor ordered = tensor.contiguous(at::MemoryFormat::ChannelsLast);
  const int64_t c = tensor.size(1), h = tensor.size(2), w = tensor.size(3);
  return ordered.as_strided(tensor.sizes(), {c * h * w, 1, c * w, c});
}

}  // namespace ddp::trainer
