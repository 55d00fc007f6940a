#include "ddp/amp/unscale.h"

#include <map>
#include <string>
#include <utility>

#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/zeros.h"

namespace ddp {

at::Tensor UnscaleGradients(const std::vector<at::Tensor>& gradients, double inverse_scale,
                            c10::Device device) {
  // A kernel call takes tensors of one dtype and device.
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>> alike;
  for (const at::Tensor& gradient : gradients) {
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

}  // namespace ddp
