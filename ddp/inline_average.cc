#include "ddp/inline_average.h"

#include <exception>
#include <vector>

#include "torch/csrc/autograd/engine.h"

namespace ddp {

bool AveragesInline(c10d::ProcessGroup& group, c10::DeviceType device) {
  return device == c10::DeviceType::CPU && group.getBackend(device)->getBackendName() == "shm";
}

c10::intrusive_ptr<c10::ivalue::Future> InlineAverage::runHook(c10d::GradBucket& bucket) {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  std::vector<at::Tensor> tensors = {bucket.getBufferRef()};
  const c10::intrusive_ptr<c10d::Work> work = state_->allreduce(tensors, options);
  const c10::intrusive_ptr<c10::ivalue::Future> future = work->getFuture();
  if (!bucket.isLast()) return future;
  // Before the Reducer's own callback, which it adds when all buckets are on their way. Not here:
  // what is left of backward may have to go on for the other ranks to get to their all-reduce.
  torch::autograd::Engine::get_default_engine().queue_callback([work] {
    try {
      work->wait();
    } catch (const std::exception&) {
      // The future has it, and the Reducer looks at the futures of all buckets, in their order.
    }
  });
  return future;
}

}  // namespace ddp
