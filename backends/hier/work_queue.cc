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
    try {
      run_();
    } catch (...) {
      error_ = std::current_exception();
    }
    run_ = nullptr;
  }

  void Finish() {
    if (error_) {
      future_->setError(error_);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(error_);
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  const uint64_t sequence_number_;
  const std::vector<at::Tensor> outputs_;
  std::function<void()> run_;
  std::exception_ptr error_;
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

bool WorkQueue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty();
}

void WorkQueue::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty(); });
}

void WorkQueue::Loop() {
  pthread_setname_np(pthread_self(), "hier");
  // Collectives are not recorded by autograd. This thread uses no OpenMP team, which would compete
  // with those of the rank's computations.
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::ParallelGuard no_team(true);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    c10::intrusive_ptr<QueuedWork> work = queue_.front();
    lock.unlock();
    work->Run();
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
    // A caller that has waited for the last work may destroy the group, and must find it idle.
    lock.unlock();
    work->Finish();
    work.reset();
    lock.lock();
  }
}

}  // namespace ddp::backends::hier
