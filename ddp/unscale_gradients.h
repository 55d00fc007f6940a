// Unscales gradients and checks them for infinities and NaNs, for unsharded and sharded optimizers;
// and what an optimizer is to GradScaler (ddp/amp/grad_scaler.h) that does it by itself.
//
//   at::Tensor found = UnscaleGradients(gradients, 1 / scale, device);
//   if (found.item<float>() != 0) …  // skip the step
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros.h"
#include "c10/core/Device.h"

namespace ddp {

// Multiplies `gradients`, which are dense, by `inverse_scale`, in place. Returns [1] float32 on
// `device`: 1 if an element was infinite or NaN, else 0. Does not wait for the devices.
// Thread-compatible.
inline at::Tensor UnscaleGradients(const std::vector<at::Tensor>& gradients, double inverse_scale,
                                   c10::Device device) {
  // A kernel call takes tensors of one dtype and device.
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>> alike;
  for (const at::Tensor& given : gradients) {
    // One that keeps its conjugation for later is changed where it lies.
    const at::Tensor plain = given.is_conj() ? given.conj() : given;
    const at::Tensor gradient = plain.is_complex() ? at::view_as_real(plain) : plain;
    alike[{gradient.scalar_type(), gradient.device().str()}].push_back(gradient);
  }
  at::Tensor found = at::zeros({1}, at::TensorOptions(device).dtype(at::kFloat));
  for (auto& [key, tensors] : alike) {
    const at::TensorOptions as_float = tensors[0].options().dtype(at::kFloat);
    at::Tensor found_here = at::zeros({1}, as_float);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_here,
                                                   at::full({1}, inverse_scale, as_float));
    found = at::maximum(found, found_here.to(device));
  }
  return found;
}

// Derived from by an optimizer whose gradients are not those of its parameters, as a sharded one's.
class UnscalesGradients {
 public:
  virtual ~UnscalesGradients() = default;
  // Multiplies all gradients by `inverse_scale`. Returns whether one was infinite or NaN, the same
  // on all ranks: it may be collective.
  virtual bool unscale_(double inverse_scale) = 0;
};

}  // namespace ddp
