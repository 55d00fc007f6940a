// Moves batches to the device; the memory order of images.
//
//   const data::Batch there = ToDevice(batch, session.device(), /*channels_last=*/true);
#pragma once

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/util/Exception.h"
#include "ddp/data/dataset.h"

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

// The batch on `device`; with channels_last, a 4-dimensional input in channels-last order.
inline data::Batch ToDevice(const data::Batch& batch, c10::Device device, bool channels_last) {
  TORCH_CHECK(batch.input.defined(), "the data set has given a batch without an input");
  data::Batch there = {batch.input.to(device),
                       batch.target.defined() ? batch.target.to(device) : batch.target};
  if (channels_last) there.input = ChannelsLast(there.input);
  return there;
}

}  // namespace ddp::trainer
