// The c10d::Work of one operation of the shared-memory backend.
//
//   auto work = c10::make_intrusive<ShmWork>(group, c10d::OpType::BROADCAST, "shm:broadcast");
//   work->requests.push_back(request);             // on memory of work->tensors()
//   work->Start(tensors, std::chrono::minutes(5));
//   work->wait();
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "backends/common/staging.h"
#include "backends/shm/engine/engine_op.h"
#include "backends/shm/shm_group.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::shm {

// Thread-safe. Keeps the tensors alive until it is done. If wait() times out, it throws and the
// operation continues. Failures throw c10::DistBackendError with the rank, the operation, and the
// rank that caused it.
class ShmWork final : public c10d::Work, public EngineOp {
 public:
  ShmWork(std::shared_ptr<ShmGroup> group, c10d::OpType op, const char* title);

  // The memory that the requests read and write; copied back before this is done.
  Staging& tensors() { return tensors_; }

  // Submits it to the engine. `outputs` is the value of result() and of the future.
  void Start(std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout);

  bool isCompleted() override { return done(); }
  bool isSuccess() const override { return done() && status().ok(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void BeforeDone() override;
  void AfterDone() override;
  void CompleteFuture(c10::ivalue::Future& future) const;

  const std::shared_ptr<ShmGroup> group_;
  Staging tensors_;
  std::vector<at::Tensor> outputs_;

  // A reference to this object, held while the engine uses it.
  c10::intrusive_ptr<ShmWork> self_;

  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

}  // namespace ddp::backends::shm
