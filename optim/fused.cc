#include "optim/fused.h"

#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "ATen/ops/_fused_adam.h"
#include "ATen/ops/_fused_adamw.h"
#include "ATen/ops/_fused_sgd.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/full.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros_like.h"
#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::optim {
namespace {

using torch::optim::OptimizerParamGroup;

torch::Tensor Evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  at::AutoGradMode enable_grad(true);
  return closure();
}

// Arguments of one kernel call: tensors of one device and dtype, in parameter order.
struct Fusion {
  std::vector<at::Tensor> parameters, gradients, first, second, third, steps;
};

// Key of a kernel call: device, dtype, and its scalar argument (the step count, or whether momentum
// starts).
using Key = std::tuple<int, int, int, int64_t>;

Key KeyOf(const at::Tensor& parameter, int64_t scalar) {
  return {static_cast<int>(parameter.device().type()), parameter.device().index(),
          static_cast<int>(parameter.scalar_type()), scalar};
}

// Leaves each parameter once in its group. `distinct` is the number of parameters that the groups
// had after the call before.
void KeepDistinct(std::vector<OptimizerParamGroup>& groups, size_t& distinct) {
  size_t count = 0;
  for (const OptimizerParamGroup& group : groups) count += group.params().size();
  if (count == distinct) return;
  std::unordered_map<const void*, size_t> group_of;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<at::Tensor> once;
    for (const at::Tensor& parameter : groups[i].params()) {
      const auto [found, is_new] = group_of.emplace(parameter.unsafeGetTensorImpl(), i);
      TORCH_CHECK(found->second == i, "a parameter of shape ", parameter.sizes(),
                  " is in parameter groups ", found->second, " and ", i,
                  " of the optimizer, which would step twice; put it in one of them");
      if (is_new) once.push_back(parameter);
    }
    groups[i].params() = std::move(once);
  }
  distinct = group_of.size();
}

// Whether all can be fused. `squares`: the base class would square complex gradients.
bool CanFuse(const std::vector<OptimizerParamGroup>& groups, bool squares) {
  bool all = true, any_complex = false;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      any_complex |= parameter.is_complex();
      // The kernels ignore strides, so all tensors of a parameter need the same memory layout.
      all &= !gradient.is_sparse() && (parameter.is_floating_point() || parameter.is_complex()) &&
             gradient.scalar_type() == parameter.scalar_type() &&
             parameter.is_non_overlapping_and_dense() && gradient.strides() == parameter.strides();
    }
  }
  TORCH_CHECK(
      all || !squares || !any_complex,
      "with complex parameters, all gradients must be dense, and have the dtype and strides "
      "of their parameters, which must have no gaps in memory");
  return all;
}

// Complex numbers as pairs of real ones.
at::Tensor AsReal(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

// `state` in its parameter's memory layout: one from a checkpoint may differ (channels last).
at::Tensor InOrderOf(const at::Tensor& parameter, const at::Tensor& state) {
  if (!state.defined() || state.strides() == parameter.strides()) return state;
  return at::empty_like(parameter).copy_(state);
}

// Adam and AdamW differ in types and kernel, not in structure.
template <typename Options, typename State, typename Kernel>
void FusedAdamStep(torch::optim::Optimizer& optimizer, const Kernel& kernel) {
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<Key, Fusion> fusions;
    for (at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (slot == nullptr) {
        auto fresh = std::make_unique<State>();
        fresh->step(0);
        fresh->exp_avg(at::zeros_like(parameter));
        fresh->exp_avg_sq(at::zeros_like(parameter));
        if (options.amsgrad()) fresh->max_exp_avg_sq(at::zeros_like(parameter));
        slot = std::move(fresh);
      }
      auto& state = static_cast<State&>(*slot);
      state.step(state.step() + 1);
      state.exp_avg(InOrderOf(parameter, state.exp_avg()));
      state.exp_avg_sq(InOrderOf(parameter, state.exp_avg_sq()));
      state.max_exp_avg_sq(InOrderOf(parameter, state.max_exp_avg_sq()));
      Fusion& fusion = fusions[KeyOf(parameter, state.step())];
      fusion.parameters.push_back(AsReal(parameter));
      fusion.gradients.push_back(AsReal(parameter.grad()));
      fusion.first.push_back(AsReal(state.exp_avg()));
      fusion.second.push_back(AsReal(state.exp_avg_sq()));
      if (options.amsgrad()) fusion.third.push_back(AsReal(state.max_exp_avg_sq()));
    }
    for (auto& [key, fusion] : fusions) {
      // The kernel only reads the step, so one tensor serves all parameters.
      const at::Tensor step = at::full({}, static_cast<double>(std::get<3>(key)),
                                       fusion.parameters[0].options().dtype(at::kFloat));
      fusion.steps.assign(fusion.parameters.size(), step);
      const auto [beta1, beta2] = options.betas();
      kernel(fusion.parameters, fusion.gradients, fusion.first, fusion.second, fusion.third,
             fusion.steps, options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
             options.amsgrad(), /*maximize=*/false);
    }
  }
}

}  // namespace

FusedSGD::FusedSGD(const std::vector<OptimizerParamGroup>& groups,
                   torch::optim::SGDOptions defaults)
    : SGD(groups, std::move(defaults)) {
  KeepDistinct(param_groups_, distinct_);
}

FusedSGD::FusedSGD(std::vector<torch::Tensor> parameters, torch::optim::SGDOptions defaults)
    : FusedSGD({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

torch::Tensor FusedSGD::step(LossClosure closure) {
  c10::NoGradGuard no_grad;
  torch::Tensor loss = Evaluate(closure);
  KeepDistinct(param_groups_, distinct_);
  if (!CanFuse(param_groups_, /*squares=*/false)) {
    torch::optim::SGD::step();
    return loss;
  }
  for (OptimizerParamGroup& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    const bool with_momentum = options.momentum() != 0;
    std::map<Key, Fusion> fusions;
    for (at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      bool starts = true;
      at::Tensor momentum;
      if (with_momentum) {
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        starts = slot == nullptr;
        if (starts) {
          auto fresh = std::make_unique<torch::optim::SGDParamState>();
          fresh->momentum_buffer(at::zeros_like(parameter));
          slot = std::move(fresh);
        }
        auto& state = static_cast<torch::optim::SGDParamState&>(*slot);
        state.momentum_buffer(InOrderOf(parameter, state.momentum_buffer()));
        momentum = state.momentum_buffer();
      }
      Fusion& fusion = fusions[KeyOf(parameter, starts)];
      fusion.parameters.push_back(AsReal(parameter));
      fusion.gradients.push_back(AsReal(parameter.grad()));
      if (with_momentum) fusion.first.push_back(AsReal(momentum));
    }
    for (auto& [key, fusion] : fusions) {
      at::_fused_sgd_(fusion.parameters, fusion.gradients, fusion.first, options.weight_decay(),
                      options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                      /*maximize=*/false, /*is_first_step=*/std::get<3>(key) != 0);
    }
  }
  return loss;
}

FusedAdam::FusedAdam(const std::vector<OptimizerParamGroup>& groups,
                     torch::optim::AdamOptions defaults)
    : Adam(groups, std::move(defaults)) {
  KeepDistinct(param_groups_, distinct_);
}

FusedAdam::FusedAdam(std::vector<torch::Tensor> parameters, torch::optim::AdamOptions defaults)
    : FusedAdam({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

torch::Tensor FusedAdam::step(LossClosure closure) {
  c10::NoGradGuard no_grad;
  torch::Tensor loss = Evaluate(closure);
  KeepDistinct(param_groups_, distinct_);
  if (!CanFuse(param_groups_, /*squares=*/true)) {
    torch::optim::Adam::step();
    return loss;
  }
  FusedAdamStep<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      *this, [](auto&&... args) { at::_fused_adam_(args...); });
  return loss;
}

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups,
                       torch::optim::AdamWOptions defaults)
    : AdamW(groups, std::move(defaults)) {
  KeepDistinct(param_groups_, distinct_);
}

FusedAdamW::FusedAdamW(std::vector<torch::Tensor> parameters, torch::optim::AdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  c10::NoGradGuard no_grad;
  torch::Tensor loss = Evaluate(closure);
  KeepDistinct(param_groups_, distinct_);
  if (!CanFuse(param_groups_, /*squares=*/true)) {
    torch::optim::AdamW::step();
    return loss;
  }
  FusedAdamStep<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
      *this, [](auto&&... args) { at::_fused_adamw_(args...); });
  return loss;
}

}  // namespace ddp::optim
