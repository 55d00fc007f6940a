// The Work of a watched call: wraps the inner backend's Work, and adds to its errors which rank
// caused them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "backends/watch/watchdog.h"
#include "third_party/libtorch/forwarding.h"

namespace ddp::backends::watch {

// How wait() ends after the group is aborted.
enum class Waiting {
  kByBackend,  // the abort of the inner backend
  kByWatch,    // a future that the watchdog fails; the abort of the inner backend may end it late
};

// Thread-safe if the inner Work is.
class WatchedWork final : public ForwardingWork {
 public:
  // `number`: of the call in `recorder`, which is one of the watchdog's.
  WatchedWork(int rank, c10d::OpType op, c10::intrusive_ptr<c10d::Work> inner,
              c10::intrusive_ptr<Watchdog> watchdog, Recorder& recorder, uint64_t number,
              Waiting waiting);
  ~WatchedWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  struct Relay;

  void Ended();
  bool InnerWait(std::chrono::milliseconds timeout);
  // Whether the group was aborted before the inner Work completed.
  bool AbortedEarly() const;
  bool IsMessage() const { return recorder_ == &watchdog_->messages(); }
  std::exception_ptr Explained(const std::exception_ptr& error) const;
  std::shared_ptr<Relay> CurrentRelay() const;
  std::shared_ptr<Relay> MakeRelay();
  void AwaitRelay(std::chrono::milliseconds timeout);

  const c10::intrusive_ptr<Watchdog> watchdog_;
  Recorder* const recorder_;
  const uint64_t number_;
  const Waiting waiting_;
  std::atomic<bool> ended_{false};
  std::shared_ptr<Relay> relay_;  // guarded by Work::mutex_; created on first use
};

}  // namespace ddp::backends::watch
