// Runs the collectives of one group: in the order of the calls, on one thread.
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
  // Waits for all that was submitted.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // `outputs` is what the work's future and result() hold.
  c10::intrusive_ptr<c10d::Work> Submit(c10d::OpType op, std::vector<at::Tensor> outputs,
                                        std::function<void()> run);

  // How many there have been.
  uint64_t submitted();

  // Whether all that was submitted has ended; Drain blocks until it has.
  bool idle();
  void Drain();

 private:
  class QueuedWork;

  void Loop();

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<QueuedWork>> queue_;  // the first one runs
  uint64_t submitted_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ddp::backends::hier
