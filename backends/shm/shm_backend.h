// The shared-memory backend as a c10d::Backend. docs/backends.md: when to use it, how fast it is.
//
//   DDP_ASSIGN_OR_RETURN(auto backend, ShmBackend::Create(options));
//   backend->allreduce(tensors)->wait();
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "backends/common/split_prefixes.h"
#include "backends/common/tensor_checks.h"
#include "backends/shm/shm_group.h"
#include "backends/shm/work.h"
#include "base/backend_capabilities.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::shm {

// All collectives of c10d::Backend but allreduce_sparse, on CPU tensors; allreduce itself takes
// sparse tensors. Operations that only move data support every dtype; for reductions see
// reduce_kernels.h. Tensors that are not contiguous are copied. Sums are in rank order: the same
// bits on all ranks and in every run.
//
// Thread-safe; collectives must be called in the same order on all ranks, as with any backend.
// Wrong arguments throw c10::Error from the call (tensor_checks.h); later errors are reported by
// the Work, as c10::DistBackendError. After such a failure the group cannot be used any more; a new
// one can be made.
class ShmBackend final : public c10d::Backend, public CapabilityProvider {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  static constexpr BackendCapabilities kCapabilities = {.collectives_use_callers_cores = true,
                                                        .abort_ends_waits = true};

  // Collective.
  static absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Create(const BackendOptions& options);

  ShmBackend(std::shared_ptr<ShmGroup> group, BackendOptions options);
  // Pending operations fail.
  ~ShmBackend() override;

  BackendCapabilities capabilities() const override { return kCapabilities; }
  void Progress(const std::function<bool()>& done) override { group_->engine().Progress(done); }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10d_options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_.load(std::memory_order_relaxed); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Makes a group of `ranks` of this one. Collective over `ranks`; null on other ranks, which need
  // not call.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  // Allocates tensors in the shared arena. An all-reduce copies nothing if the tensors of all ranks
  // are there. c10d's Reducer allocates its buckets in this way. If the arena is full, the tensor
  // is in ordinary memory. Tensors may outlive the backend. Those of a complex dtype are pairs of
  // real numbers, 2 * size, as the Reducer makes buckets that it allocates itself (LibTorch 2.15.0:
  // it expects them of a backend, too, but asks for `size` complex ones).
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& output_lists, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  using WorkRef = c10::intrusive_ptr<ShmWork>;

  CallName NameCall(const char* operation) const { return {operation, rank_, size_}; }
  WorkRef NewWork(c10d::OpType type, const CallName& call);
  WorkPtr Start(WorkRef work, Tensors outputs, std::chrono::milliseconds timeout);
  WorkPtr Message(Kind kind, Tensors& tensors, int peer, int tag);
  void AddAllGather(const CallName& call, ShmWork& work, const at::Tensor& input,
                    const Tensors& outputs) const;

  const std::shared_ptr<ShmGroup> group_;
  const BackendOptions options_;
  const c10::intrusive_ptr<Options> c10d_options_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;
  std::atomic<uint64_t> calls_{0};
  SplitPrefixes splits_;
  std::atomic<bool> shut_down_{false};
};

}  // namespace ddp::backends::shm
