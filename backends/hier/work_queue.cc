#include "backends/hier/work_queue.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/ivalue_inl.h"
#include "ATen/core/jit_type.h"
#include "c10/util/ParallelGuard.h"

namespace ddp::backends::hier {

class WorkQueue::QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, c10d::OpType op, uint64_t sequence_number, std::vector<at::Tensor> outputs,
             std::function<void()> run)
      : Work(rank, op),
        sequence_number_(sequence_number),
        outputs_(std::move(outputs)),
        run_(std::move(run)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  void Run() {
    std::exception_ptr error;
    try {
      run_();
    } catch (...) {
      error = std::current_exception();
    }
    run_ = nullptr;
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  const uint64_t sequence_number_;
  const std::vector<at::Tensor> outputs_;
  std::function<void()> run_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

WorkQueue::WorkQueue(int rank) : rank_(rank), thread_([this] { Loop(); }) {}

WorkQueue::~WorkQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

c10::intrusive_ptr<c10d::Work> WorkQueue::Submit(c10d::OpType op, std::vector<at::Tensor> outputs,
                                                 std::function<void()> run) {
  c10::intrusive_ptr<QueuedWork> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work = c10::make_intrusive<QueuedWork>(rank_, op, submitted_++, std::move(outputs),
                                           std::move(run));
    queue_.push_back(work);
  }
  changed_.notify_all();
  return work;
}

uint64_t WorkQueue::submitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

void WorkQueue::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty(); });
}

void WorkQueue::Loop() {
  pthread_setname_np(pthread_self(), "hier");
  // Collectives are no part of anyone's graph, and this thread wants no team of its own beside
  // those of the ranks' own computations.
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard no_team(true);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    c10::intrusive_ptr<QueuedWork> work = queue_.front();
    lock.unlock();
    work->Run();
    work.reset();  // what it held may be large, or the last reference to this group's user
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace ddp::backends::hier
