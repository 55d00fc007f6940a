#include "ddp/clip_grad.h"

#include <algorithm>
#include <cmath>

#include "ATen/ops/_foreach_clamp_max.h"
#include "ATen/ops/_foreach_clamp_min.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/stack.h"
#include "c10/core/GradMode.h"
#include "ddp/grad_norm.h"
#include "ddp/memory_order.h"

namespace ddp {
namespace {

std::vector<at::Tensor> GradientsOf(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

double NormOnDevice(const std::vector<at::Tensor>& gradients, double norm_type) {
  std::vector<at::Tensor> norms = at::_foreach_norm(gradients, norm_type);
  for (at::Tensor& norm : norms) norm = norm.to(norms[0].device(), at::kFloat);
  return at::linalg_vector_norm(at::stack(norms), norm_type).item<double>();
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = GradientsOf(parameters);
  if (gradients.empty()) return 0.0;
  std::vector<NormSegment> segments;
  bool on_cpu = true;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(!gradient.is_sparse(), "clip_grad_norm_: sparse gradients are not supported");
    on_cpu &= gradient.device().is_cpu() && gradient.is_floating_point();
  }
  for (const at::Tensor& parameter : parameters) {
    if (!on_cpu || !parameter.grad().defined()) continue;
    const at::Tensor values = FlatInMemoryOrder(parameter, parameter.grad());
    segments.push_back({.tensor = static_cast<int>(segments.size()),
                        .numel = values.numel(),
                        .end = values.numel(),
                        .values = values,
                        .element_bytes = static_cast<int64_t>(values.element_size())});
  }
  const double total =
      on_cpu ? BlockedNorm(segments, norm_type) : NormOnDevice(gradients, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total), "the norm of the gradients is ", total,
              "; a step with them would destroy the parameters");
  // Multiply also by a factor of 1, so that the cost does not depend on the data.
  at::_foreach_mul_(gradients, ClipFactor(total, max_norm));
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = GradientsOf(parameters);
  if (gradients.empty()) return;
  at::_foreach_clamp_min_(gradients, -clip_value);
  at::_foreach_clamp_max_(gradients, clip_value);
}

}  // namespace ddp
