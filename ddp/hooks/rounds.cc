#include "ddp/hooks/rounds.h"

#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ddp/reducer.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace ddp::hooks {

using c10::ivalue::Future;

c10::intrusive_ptr<Future> RoundsHook::runHook(c10d::GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  if (bucket.getIndex() == 0) pending_.clear();  // of a backward that has failed
  const at::Tensor& buffer = bucket.getBuffer();
  c10::intrusive_ptr<Future> future;
  std::unique_ptr<BucketRounds> rounds = buffer.is_sparse() ? nullptr : Begin(bucket);
  if (rounds == nullptr) {
    // A sparse result is in the Work, not in the bucket.
    future = Mean(buffer)->getFuture();
  } else {
    future = NewFuture(buffer);
    WorkPtr work = rounds->Next();
    pending_.push_back({std::move(rounds), std::move(work), buffer, future});
  }
  if (bucket.isLast()) EndBuckets();
  if (!bucket.isLast() || pending_.empty()) return future;
  if (torch::autograd::get_current_graph_task_id() == -1) {
    Finish();
  } else {
    // Runs before the Reducer's own callback, which waits for the futures and is queued after this
    // hook returns.
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Finish(); });
  }
  return future;
}

// An error goes to the Reducer by the futures, as that of any collective.
void RoundsHook::Finish() {
  const at::NoGradGuard no_grad;
  std::vector<Pending> all = std::exchange(pending_, {});
  try {
    for (bool more = true; more;) {
      more = false;
      for (Pending& one : all) {
        if (one.future->completed()) continue;
        if (one.work) {
          one.work->wait();
          one.work = one.rounds->Next();
        }
        if (one.work) {
          more = true;
        } else {
          one.future->markCompleted(c10::IValue(one.buffer));
        }
      }
    }
  } catch (...) {
    for (Pending& one : all) one.future->setErrorIfNeeded(std::current_exception());
  }
}

at::Tensor RoundsHook::parseHookResult(const c10::IValue& result) {
  return c10d::detail::parseCppCommHookResult(result);
}

WorkPtr RoundsHook::Sum(const at::Tensor& tensor) {
  CountBytes(tensor);
  std::vector<at::Tensor> tensors = {tensor};
  return group_->allreduce(tensors);
}

WorkPtr RoundsHook::Mean(const at::Tensor& tensor) {
  CountBytes(tensor);
  return AllReduceMean(*group_, tensor);
}

}  // namespace ddp::hooks
