#include "ddp/comm_hook.h"

#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace ddp {

std::optional<BackendWithCapabilities> BackendOnCallersCores(c10d::ProcessGroup& group,
                                                             c10::DeviceType device) {
  if (device != c10::DeviceType::CPU) return std::nullopt;
  c10::intrusive_ptr<c10d::Backend> backend = group.getBackend(device);
  auto* declares = dynamic_cast<CapabilityProvider*>(backend.get());
  if (declares == nullptr || !declares->capabilities().collectives_use_callers_cores) {
    return std::nullopt;
  }
  return BackendWithCapabilities{std::move(backend), declares};
}

c10::intrusive_ptr<c10d::Work> AllReduceMean(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  c10d::AllreduceOptions options;
  std::vector<at::Tensor> tensors = {tensor};
  if (BackendOnCallersCores(group, tensor.device().type())) {
    options.reduceOp = c10d::ReduceOp::AVG;
  } else {
    const at::NoGradGuard no_grad;
    tensors[0].div_(group.getSize());
  }
  return group.allreduce(tensors, options);
}

c10::intrusive_ptr<c10::ivalue::Future> NewFuture(const at::Tensor& result) {
  std::vector<c10::Device> devices;
  if (!result.is_cpu()) devices.push_back(result.device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
}

c10::intrusive_ptr<c10::ivalue::Future> AverageHook::runHook(c10d::GradBucket& bucket) {
  CountBytes(bucket.getBuffer());
  if (*factor_ != 1) bucket.getBufferRef().mul_(*factor_);
  return AllReduceMean(*state_, bucket.getBuffer())->getFuture();
}

ProgressHook::ProgressHook(BackendWithCapabilities backend,
                           std::unique_ptr<c10d::CommHookInterface> inner)
    : backend_(std::move(backend)), inner_(std::move(inner)) {}

c10::intrusive_ptr<c10::ivalue::Future> ProgressHook::runHook(c10d::GradBucket& bucket) {
  const c10::intrusive_ptr<c10::ivalue::Future> future = inner_->runHook(bucket);
  if (!bucket.isLast() || torch::autograd::get_current_graph_task_id() == -1) return future;
  // This callback runs before the Reducer's own, which is queued after this hook returns. Do not
  // advance collectives here: the rest of backward may have to run before other ranks can reach
  // their all-reduce. Errors stay in the futures, which the Reducer checks.
  torch::autograd::Engine::get_default_engine().queue_callback([backend = backend_, future] {
    backend.declares->Progress([&future] { return future->completed(); });
  });
  return future;
}

at::Tensor ProgressHook::parseHookResult(const c10::IValue& result) {
  return inner_->parseHookResult(result);
}

}  // namespace ddp
