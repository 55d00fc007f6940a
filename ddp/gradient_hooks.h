// Hooks on the gradient accumulators of parameters, by which gradients are reduced: who has one,
// and giving a parameter its own back. c10d's Reducer has a LambdaPostHook on each of its
// parameters.
#pragma once

#include <memory>

#include "ATen/core/Tensor.h"
#include "c10/util/intrusive_ptr.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/utils/lambda_post_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace ddp {

// A DistributedDataParallel that leaves gradients to a sharded optimizer has this hook, which does
// nothing.
struct WrapperMark : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return outputs;
  }
};

// The base class of a sharded optimizer's hooks that reduce gradients in backward.
struct ShardedGradientHook : torch::autograd::FunctionPostHook {};

// Whether the parameter has a hook of this kind. Not collective. Thread-compatible.
template <typename Hook>
bool HasGradientHook(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator == nullptr) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<const Hook*>(hook.get()) != nullptr) return true;
  }
  return false;
}

inline bool HasReducer(const at::Tensor& parameter) {
  return HasGradientHook<torch::autograd::utils::LambdaPostHook>(parameter);
}

namespace gradient_hooks_internal {

template <typename Node>
std::weak_ptr<Node> Weak(const std::shared_ptr<Node>& node) {
  return node;
}
template <typename Node>
c10::weak_intrusive_ptr<Node> Weak(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

}  // namespace gradient_hooks_internal

// Gives the parameter its accumulator back, with the hooks: Tensor::set_, by which torch::load
// works, and Module::to another dtype or device take it away. Call it before a forward: a graph
// keeps the accumulators that it was made with. False: the parameter has another shape, dtype or
// device than the accumulator. Not collective. Thread-compatible.
inline bool RestoreAccumulator(const at::Tensor& parameter, const NodePtr& accumulator) {
  if (torch::autograd::impl::try_get_grad_accumulator(parameter) == accumulator) return true;
  const auto& metadata = accumulator->input_metadata(0);
  if (metadata.dtype() != parameter.dtype() || metadata.device() != parameter.device() ||
      !metadata.is_same_shape(parameter)) {
    return false;
  }
  torch::autograd::impl::set_grad_accumulator(parameter,
                                              gradient_hooks_internal::Weak(accumulator));
  return true;
}

}  // namespace ddp
