#include "ddp/comm_hook.h"

#include <utility>
#include <vector>

#include "torch/csrc/autograd/engine.h"

namespace ddp {

std::optional<DeclaringBackend> BackendOnCallersCores(c10d::ProcessGroup& group,
                                                      c10::DeviceType device) {
  if (device != c10::DeviceType::CPU) return std::nullopt;
  c10::intrusive_ptr<c10d::Backend> backend = group.getBackend(device);
  auto* declares = dynamic_cast<DeclaresCapabilities*>(backend.get());
  if (declares == nullptr || !declares->capabilities().collectives_use_callers_cores) {
    return std::nullopt;
  }
  return DeclaringBackend{std::move(backend), declares};
}

c10::intrusive_ptr<c10::ivalue::Future> AverageHook::runHook(c10d::GradBucket& bucket) {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  std::vector<at::Tensor> tensors = {bucket.getBufferRef()};
  if (*factor_ != 1) tensors[0].mul_(*factor_);
  return state_->allreduce(tensors, options)->getFuture();
}

ProgressHook::ProgressHook(DeclaringBackend backend, std::unique_ptr<c10d::CommHookInterface> inner)
    : backend_(std::move(backend)), inner_(std::move(inner)) {}

c10::intrusive_ptr<c10::ivalue::Future> ProgressHook::runHook(c10d::GradBucket& bucket) {
  const c10::intrusive_ptr<c10::ivalue::Future> future = inner_->runHook(bucket);
  if (!bucket.isLast()) return future;
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
