// Tensors of an example's random numbers, which do not touch torch's generators.
//
//   at::Tensor noise = Randn({3, 32, 32}, random);
#pragma once

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "c10/util/ArrayRef.h"
#include "ddp/data/random.h"

namespace ddp::data {

// float32 in [0, 1).
inline at::Tensor Rand(at::IntArrayRef sizes, Random& random) {
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  float* values = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    values[i] = static_cast<float>(random() >> 8) * 0x1p-24f;
  }
  return tensor;
}

// float32 of mean 0 and standard deviation 1.
inline at::Tensor Randn(at::IntArrayRef sizes, Random& random) {
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  float* values = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) values[i] = static_cast<float>(random.Normal());
  return tensor;
}

}  // namespace ddp::data
