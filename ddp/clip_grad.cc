#include "ddp/clip_grad.h"

#include <algorithm>
#include <cmath>

#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/stack.h"
#include "c10/core/GradMode.h"

namespace ddp {

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (gradients.empty()) return 0.0;
  std::vector<at::Tensor> norms = at::_foreach_norm(gradients, norm_type);
  for (at::Tensor& norm : norms) norm = norm.to(norms[0].device(), at::kFloat);
  const double total = at::linalg_vector_norm(at::stack(norms), norm_type).item<double>();
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total), "the norm of the gradients is ", total,
              "; a step with them would destroy the parameters");
  // Multiply also by a factor of 1, so that the cost does not depend on the data. The order of
  // arguments of min propagates NaN, as PyTorch's clamp does.
  at::_foreach_mul_(gradients, std::min(max_norm / (total + 1e-6), 1.0));
  return total;
}

}  // namespace ddp
