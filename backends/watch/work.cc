#include "backends/watch/work.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "ATen/core/ivalue.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/graph_task.h"

namespace ddp::backends::watch {

using c10::ivalue::Future;

namespace {

// During its lifetime the watchdog knows that the training thread waits for a collective.
class AwaitedScope {
 public:
  AwaitedScope(Watchdog& watchdog, uint64_t number)
      : watchdog_(watchdog.IsTrainingThread() ? &watchdog : nullptr) {
    if (watchdog_ == nullptr) return;
    before_ = watchdog_->awaited();
    watchdog_->SetAwaited(number);
  }
  ~AwaitedScope() {
    if (watchdog_ != nullptr) watchdog_->SetAwaited(before_);
  }
  AwaitedScope(const AwaitedScope&) = delete;
  AwaitedScope& operator=(const AwaitedScope&) = delete;

 private:
  Watchdog* const watchdog_;
  uint64_t before_ = 0;
};

}  // namespace

// The future that callers get: completed by the inner future, or failed by the watchdog if the
// group is aborted first.
struct WatchedWork::Relay {
  c10::intrusive_ptr<Future> future;
  std::atomic<bool> settled{false};
  std::mutex mutex;
  std::condition_variable done;
  bool completed = false;
  uint64_t callback_id = 0;

  // True for one caller only: it completes the future.
  bool Claim() { return !settled.exchange(true); }
  void Done() {
    std::lock_guard<std::mutex> lock(mutex);
    completed = true;
    done.notify_all();
  }
  void Fail(std::exception_ptr error) {
    future->setError(std::move(error));
    Done();
  }
};

WatchedWork::WatchedWork(int rank, c10d::OpType op, c10::intrusive_ptr<c10d::Work> inner,
                         c10::intrusive_ptr<Watchdog> watchdog, Recorder& recorder, uint64_t number,
                         Waiting waiting)
    : ForwardingWork(rank, op, std::move(inner)),
      watchdog_(std::move(watchdog)),
      recorder_(&recorder),
      number_(number),
      waiting_(waiting) {
  recorder_->Attach(number_, inner_.get());
}

WatchedWork::~WatchedWork() {
  if (ended_.load(std::memory_order_relaxed)) return;
  if (inner_->isCompleted()) {
    recorder_->End(number_);
  } else {
    recorder_->Abandon(number_, inner_.release());
  }
}

void WatchedWork::Ended() {
  if (ended_.load(std::memory_order_relaxed)) return;
  recorder_->End(number_);
  ended_.store(true, std::memory_order_relaxed);
}

std::exception_ptr WatchedWork::Explained(const std::exception_ptr& error) const {
  return watchdog_->Explain(error, recorder_->Name(number_), IsMessage() ? 0 : number_);
}

bool WatchedWork::wait(std::chrono::milliseconds timeout) {
  try {
    if (IsMessage()) {
      recorder_->SetAwaited(number_);
    } else if (waiting_ == Waiting::kByWatch && !inner_->isCompleted()) {
      const AwaitedScope awaited(*watchdog_, number_);
      AwaitRelay(timeout);
    }
    const bool ok = InnerWait(timeout);
    Ended();
    // This is how wait() returns for a message of Gloo that the watchdog has aborted.
    if (!ok && IsMessage() && watchdog_->aborted()) {
      std::rethrow_exception(watchdog_->AbortError(recorder_->Name(number_)));
    }
    return ok;
  } catch (const std::exception&) {
    const std::exception_ptr error = std::current_exception();
    if (const auto relay = CurrentRelay(); relay && relay->future->hasError()) {
      std::rethrow_exception(relay->future->exception_ptr());  // already explained
    }
    // The wait has timed out, but the call has not failed: it is still pending.
    if (!IsMessage() && !inner_->isCompleted() && !watchdog_->aborted()) throw;
    Ended();
    std::rethrow_exception(Explained(error));
  }
}

bool WatchedWork::InnerWait(std::chrono::milliseconds timeout) {
  if (IsMessage()) return inner_->wait(timeout);
  const AwaitedScope awaited(*watchdog_, number_);
  return inner_->wait(timeout);
}

std::shared_ptr<WatchedWork::Relay> WatchedWork::CurrentRelay() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return relay_;
}

std::shared_ptr<WatchedWork::Relay> WatchedWork::MakeRelay() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (relay_) return relay_;
  const c10::intrusive_ptr<Future> inner = inner_->getFuture();
  // On a device, completing a second future costs events and stream switches: errors there are left
  // to the backend.
  if (!inner->devices().empty()) return nullptr;
  relay_ = std::make_shared<Relay>();
  relay_->future = inner->createInstance(inner->elementType());
  const std::string name = recorder_->Name(number_);
  relay_->callback_id = watchdog_->OnAbort([relay = relay_, watchdog = watchdog_, name] {
    if (relay->Claim()) relay->Fail(watchdog->AbortError(name));
  });
  inner->addCallback([relay = relay_, watchdog = watchdog_, recorder = recorder_, number = number_,
                      name, is_message = IsMessage()](Future& future) {
    recorder->End(number);
    watchdog->RemoveCallback(relay->callback_id);
    if (!relay->Claim()) return;
    if (future.hasError()) {
      relay->Fail(watchdog->Explain(future.exception_ptr(), name, is_message ? 0 : number));
    } else {
      relay->future->markCompleted(future.value(), future.storages());
      relay->Done();
    }
  });
  return relay_;
}

void WatchedWork::AwaitRelay(std::chrono::milliseconds timeout) {
  const std::shared_ptr<Relay> relay = MakeRelay();
  if (!relay) return;
  {
    std::unique_lock<std::mutex> lock(relay->mutex);
    const auto completed = [&] { return relay->completed; };
    if (timeout == kNoTimeout) {
      relay->done.wait(lock, completed);
    } else if (!relay->done.wait_for(lock, timeout, completed)) {
      TORCH_CHECK(false, "Operation timed out!");  // the message of c10d::Work::wait
    }
  }
  if (relay->future->hasError()) std::rethrow_exception(relay->future->exception_ptr());
}

c10::intrusive_ptr<Future> WatchedWork::getFuture() {
  // A hook of DDP's Reducer, which waits for its future at the end of the backward pass.
  if (!IsMessage() && watchdog_->IsTrainingThread() &&
      torch::autograd::get_current_graph_task_id() != -1) {
    watchdog_->SetAwaited(number_);
  }
  const std::shared_ptr<Relay> relay = MakeRelay();
  return relay ? relay->future : inner_->getFuture();
}

std::exception_ptr WatchedWork::exception() const {
  if (AbortedEarly()) return watchdog_->AbortError(recorder_->Name(number_));
  const std::exception_ptr error = inner_->exception();
  return error ? Explained(error) : error;
}

// Counts as completed, with an error: a caller that polls must not poll forever.
bool WatchedWork::AbortedEarly() const {
  return waiting_ == Waiting::kByWatch && watchdog_->aborted() && !inner_->isCompleted();
}

bool WatchedWork::isCompleted() { return inner_->isCompleted() || AbortedEarly(); }
bool WatchedWork::isSuccess() const { return !AbortedEarly() && inner_->isSuccess(); }

int WatchedWork::sourceRank() const { return inner_->sourceRank(); }
std::vector<at::Tensor> WatchedWork::result() { return inner_->result(); }
void WatchedWork::synchronize() { inner_->synchronize(); }
void WatchedWork::blockCurrentStream() { inner_->blockCurrentStream(); }
void WatchedWork::abort() { inner_->abort(); }
c10::intrusive_ptr<Future> WatchedWork::getFutureResult() { return inner_->getFutureResult(); }
float WatchedWork::getDuration() const { return inner_->getDuration(); }
uint64_t WatchedWork::getSequencenumber() const { return inner_->getSequencenumber(); }

}  // namespace ddp::backends::watch
