// For the benchmark and tests: a backend whose collectives complete at once.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::watch {

class NullWork final : public c10d::Work {
 public:
  NullWork() { finish(); }
};

class NullBackend : public c10d::Backend {
 public:
  NullBackend(int rank, int size, std::string name)
      : Backend(rank, size), name_(std::move(name)), work_(c10::make_intrusive<NullWork>()) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions&) override {
    return work_;
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&,
                                           const c10d::BroadcastOptions&) override {
    return work_;
  }
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = std::move(hook);
  }
  void setGroupUid(const std::string& uid) override { Backend::setGroupUid(uid); }
  void abort() override { ++aborts; }
  void shutdown() override { ++shutdowns; }

  int aborts = 0;
  int shutdowns = 0;

 private:
  const std::string name_;
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp::backends::watch
