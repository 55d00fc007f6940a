// Unscales gradients and checks them for infinities and NaNs, for unsharded and sharded optimizers.
//
//   at::Tensor found = UnscaleGradients(gradients, 1 / scale, device);
//   if (found.item<float>() != 0) …  // skip the step
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"

namespace ddp {

// Multiplies `gradients`, which are dense, by `inverse_scale`, in place. Returns [1] float32 on
// `device`: 1 if an element was infinite or NaN, else 0. Does not wait for the devices.
// Thread-compatible.
at::Tensor UnscaleGradients(const std::vector<at::Tensor>& gradients, double inverse_scale,
                            c10::Device device);

}  // namespace ddp
