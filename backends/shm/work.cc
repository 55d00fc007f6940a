#include "backends/shm/work.h"

#include <limits>
#include <string>
#include <utility>

#include "ATen/record_function.h"
#include "c10/util/Exception.h"

namespace ddp::backends::shm {
namespace {

c10::DistBackendError Error(const absl::Status& status) {
  return c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                               std::string(status.message()));
}

}  // namespace

ShmWork::ShmWork(std::shared_ptr<ShmGroup> group, c10d::OpType op, const char* title)
    // A title makes c10d::Work allocate a record for the profiler, so only if a profiler is active.
    : c10d::Work(group->rank(), op, at::hasCallbacks() ? title : nullptr),
      group_(std::move(group)) {
  calls_after_done = true;
}

void ShmWork::Start(std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout) {
  outputs_ = std::move(outputs);
  calls_before_done = tensors_.HasCopies();
  timeout_ns = std::chrono::nanoseconds(timeout).count();
  self_ = c10::intrusive_ptr<ShmWork>::reclaim_copy(this);
  group_->engine().Submit(this);
}

void ShmWork::BeforeDone() { tensors_.CopyBack(); }

void ShmWork::AfterDone() {
  // Released last, with everything that it keeps alive.
  const c10::intrusive_ptr<ShmWork> self = std::move(self_);
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_ && !std::exchange(future_completed_, true)) future = future_;
  }
  if (future) CompleteFuture(*future);
}

std::exception_ptr ShmWork::exception() const {
  if (!done() || status().ok()) return nullptr;
  return std::make_exception_ptr(Error(status()));
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!done()) {
    const int64_t until = timeout == kNoTimeout
                              ? std::numeric_limits<int64_t>::max()
                              : NowNs() + std::chrono::nanoseconds(timeout).count();
    const absl::Status waited = group_->engine().Wait(this, until);
    if (!waited.ok()) throw Error(waited);
  }
  if (!status().ok()) throw Error(status());
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  bool complete_here = false;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) return future_;
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    // AfterDone may look for a future at the same time: the first of the two completes it.
    complete_here = done() && !std::exchange(future_completed_, true);
  }
  if (complete_here) CompleteFuture(*future_);
  return future_;
}

void ShmWork::CompleteFuture(c10::ivalue::Future& future) const {
  if (status().ok()) {
    future.markCompleted(c10::IValue(outputs_));
  } else {
    future.setError(exception());
  }
}

}  // namespace ddp::backends::shm
