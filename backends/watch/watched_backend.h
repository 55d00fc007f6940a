// The wrapper of a backend: forwards each virtual function of c10d::Backend to the inner backend.
//
// Implementation of watch.h. forwarding_test compares the list of functions with c10d's.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/common/split_prefixes.h"
#include "backends/watch/call_record.h"
#include "backends/watch/watch.h"
#include "backends/watch/watchdog.h"
#include "backends/watch/work.h"
#include "base/backend_capabilities.h"
#include "third_party/libtorch/compat.h"
#include "third_party/libtorch/forwarding.h"

namespace ddp::backends::watch {

class WatchedBackend final : public ForwardingBackend, public CapabilityProvider {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WatchedBackend(BackendPtr inner, c10::intrusive_ptr<c10d::Store> store, WatchOptions options);
  ~WatchedBackend() override;

  std::set<int> DeadRanks() const { return watchdog_->DeadRanks(); }

  BackendCapabilities capabilities() const override { return capabilities_; }
  void Progress(const std::function<bool()>& done) override;

  // Collectives and messages: recorded.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Forwarded unchanged.
  bool supportsSplitting() const override { return inner_->supportsSplitting(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return inner_->supportsTimeEstimation(); }
  bool supportsShrinking() const override { return inner_->supportsShrinking(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void startCoalescing() override { inner_->startCoalescing(); }
  // It is not recorded as a collective: a batch may consist of messages that not all ranks send.
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }
  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void waitForPendingWorks() override { inner_->waitForPendingWorks(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }
  c10d::ErrorType getError() override { return inner_->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner_->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner_->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inner_->supportsTensorAlloc(device);
  }

  // Forwarded, with additional work in the wrapper.
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& opts) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store,
                   const c10::intrusive_ptr<Options>& opts, const int& rank,
                   const int& size) override;
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const c10::intrusive_ptr<Options>& opts_override) override;
  void abort() override;
  void shutdown() override;

 private:
  template <typename Call>
  WorkPtr Watched(c10d::OpType type, const CallRecord& record, const Call& call);
  template <typename Call>
  WorkPtr WatchedMessage(c10d::OpType type, CollectiveKind kind, const Tensors& tensors, int peer,
                         const Call& call);
  // Called in a catch block: the inner backend's call `number` has thrown. Throws the error for the
  // caller.
  [[noreturn]] void HandleError(Recorder& recorder, uint64_t number);
  // Copies to the inner backend what c10d sets by functions that are not virtual (in some
  // versions).
  void ForwardProperties();
  BackendPtr Subgroup(BackendPtr inner, const c10::intrusive_ptr<c10d::Store>& store,
                      const std::string& name);

  const c10::intrusive_ptr<c10d::Store> store_;
  const WatchOptions options_;
  const BackendCapabilities capabilities_;
  // False: the caller gets the inner backend's Works and their errors.
  const bool wraps_work_;
  const Waiting waiting_;
  const std::thread::id creator_ = std::this_thread::get_id();
  c10::intrusive_ptr<Watchdog> watchdog_;
  SplitPrefixes splits_;
  int subgroups_ = 0;
};

}  // namespace ddp::backends::watch
