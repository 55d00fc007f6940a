// Runs the collectives of one group one after another, in the order of the calls, on one thread.
//
//   WorkQueue queue(rank);
//   auto work = queue.Submit(c10d::OpType::ALLREDUCE, tensors, [=] { …; });
//   work->wait();  // throws what the function threw
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::hier {

// Thread-safe.
class WorkQueue {
 public:
  explicit WorkQueue(int rank);
  // Waits until all submitted functions have run.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // `outputs` is the value of the work's future and result().
  c10::intrusive_ptr<c10d::Work> Submit(c10d::OpType op, std::vector<at::Tensor> outputs,
                                        std::function<void()> run);

  // Number of calls of Submit.
  uint64_t submitted();

  // Whether all submitted functions have run; Drain blocks until they have.
  bool idle();
  void Drain();

 private:
  class QueuedWork;

  void Loop();

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<QueuedWork>> queue_;  // the first one is running
  uint64_t submitted_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ddp::backends::hier
