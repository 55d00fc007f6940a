// Bases of wrappers of c10d's classes: they hold the wrapped object, and forward to it the virtual
// functions that newer versions of LibTorch have and the oldest one (compat.h) has not. All others
// are the wrapper's.
//
//   class WatchedBackend final : public ForwardingBackend { … };
//
// Not forwarded, since a wrapper that knows its ranks would not see the change: reconfigure and its
// companions, which are refused as by any backend that does not support them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp {

// Thread safety and which calls are collective: as for the wrapped backend.
class ForwardingBackend : public c10d::Backend {
 protected:
  explicit ForwardingBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  c10::intrusive_ptr<c10d::Backend> inner_;

#if DDP_TORCH_AT_LEAST(2, 15)
 public:
  // By the wrapper's own gather, which every backend has. `output` on the root:
  // [world size * input.numel()], in the order of ranks.
  c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& opts) override {
    std::vector<at::Tensor> inputs = {input};
    std::vector<std::vector<at::Tensor>> outputs;
    if (opts.rootRank == getRank()) {
      TORCH_CHECK(output.is_contiguous() && output.numel() == input.numel() * getSize() &&
                      output.scalar_type() == input.scalar_type(),
                  getBackendName(), ": gather_single of ", input.numel(), " x ",
                  input.scalar_type(), " of each of ", getSize(), " ranks does not make ",
                  output.numel(), " x ", output.scalar_type());
      outputs.emplace_back();
      const at::Tensor rows = output.view({getSize(), input.numel()});
      for (int rank = 0; rank < getSize(); ++rank) {
        outputs[0].push_back(rows.select(0, rank).view(input.sizes()));
      }
    }
    return gather(outputs, inputs, opts);
  }

  bool isInitialized() override { return inner_->isInitialized(); }
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override {
    inner_->addEphemeralTimeout(timeout);
  }
  std::optional<at::Device> getBoundDeviceId() const override { return inner_->getBoundDeviceId(); }
  void setBoundDeviceId(std::optional<at::Device> device) override {
    inner_->setBoundDeviceId(device);
  }
  void startTimeEstimate() override { inner_->startTimeEstimate(); }
  float endTimeEstimate() override { return inner_->endTimeEstimate(); }
  bool supportsWindow() const override { return inner_->supportsWindow(); }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override {
    return inner_->new_window(tensor);
  }
  bool supportsAbortHooks() const override { return inner_->supportsAbortHooks(); }
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override {
    inner_->registerAbortHook(hook_id, std::move(hook));
  }
  void unregisterAbortHook(int64_t hook_id) override { inner_->unregisterAbortHook(hook_id); }
  bool supportsCompletionHooks() const override { return inner_->supportsCompletionHooks(); }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override {
    inner_->registerCompletionHook(hook_id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t hook_id) override {
    inner_->unregisterCompletionHook(hook_id);
  }
  void suspend() override { inner_->suspend(); }
  void resume() override { inner_->resume(); }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    return inner_->getMemoryStats();
  }
#endif
};

// Thread safety: as for the wrapped Work.
class ForwardingWork : public c10d::Work {
 protected:
  ForwardingWork(int rank, c10d::OpType op, c10::intrusive_ptr<c10d::Work> inner)
      : Work(rank, op), inner_(std::move(inner)) {}

  c10::intrusive_ptr<c10d::Work> inner_;

#if DDP_TORCH_AT_LEAST(2, 15)
 public:
  std::chrono::milliseconds getTimeout() const override { return inner_->getTimeout(); }
  uint64_t getCompletionKey() const override { return inner_->getCompletionKey(); }
#endif
};

}  // namespace ddp
