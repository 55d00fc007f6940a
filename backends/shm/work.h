// A collective of the shared-memory backend under way, as c10d knows it.
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

// Thread-safe. Keeps the tensors alive until it is done. wait() with a timeout that passes throws
// and leaves the collective under way; failures throw c10::DistBackendError with the rank, the
// collective, and who is to blame.
class ShmWork final : public c10d::Work, public EngineOp {
 public:
  ShmWork(std::shared_ptr<ShmGroup> group, c10d::OpType op, const char* title);

  // What the requests read and write; copied back before this is done.
  Staging& tensors() { return tensors_; }

  // Hands it to the engine. `outputs` are what result() and the future give.
  void Start(std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout);

  bool isCompleted() override { return done(); }
  bool isSuccess() const override { return done() && status().ok(); }
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void Completing() override;
  void Finished() override;
  void CompleteFuture(c10::ivalue::Future& future) const;

  const std::shared_ptr<ShmGroup> group_;
  Staging tensors_;
  std::vector<at::Tensor> outputs_;

  // This object's own reference while the engine has it.
  c10::intrusive_ptr<ShmWork> self_;

  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

}  // namespace ddp::backends::shm
