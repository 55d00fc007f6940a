// The c10d::Backend of a group that spans hosts. CreateHier (hier.h) makes one.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "backends/common/split_prefixes.h"
#include "backends/common/tensor_checks.h"
#include "backends/common/topology.h"
#include "backends/hier/link.h"
#include "backends/hier/options.h"
#include "backends/hier/parts.h"
#include "backends/hier/pipeline.h"
#include "backends/hier/work_queue.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::hier {

// A contiguous 1-d view of a tensor of any strides or, if it is not contiguous, a copy.
// Thread-compatible.
//
//   Flat flat = Flat::Of(tensor);
//   …                                // read and write flat.tensor()
//   flat.CopyBack();
class Flat {
 public:
  static Flat Of(const at::Tensor& tensor);
  // The tensor is only written: contents of a copy are undefined.
  static Flat ToFill(const at::Tensor& tensor);

  const at::Tensor& tensor() const { return flat_; }
  // Copies a copy to the original tensor; does nothing for a view.
  void CopyBack();

 private:
  Flat(at::Tensor original, at::Tensor flat)
      : original_(std::move(original)), flat_(std::move(flat)) {}
  at::Tensor original_, flat_;
};

// Collectives run one after another, in the order of the calls, on a thread of the group.
// Thread-safe; collectives must be called in the same order on all ranks.
//
// Allreduce, reduce, broadcast, allgather, reduce_scatter (in all forms) and barrier are
// hierarchical: inside hosts, then between hosts. Gather, scatter, alltoall and messages between
// two ranks use a flat group of all ranks.
//
// Wrong arguments throw c10::Error from the call (tensor_checks.h). After a failure in any part the
// group cannot be used any more: this rank aborts all its parts, which ends collectives of the
// other ranks that wait for it, and they do the same. Each later call throws c10::DistBackendError
// with this rank's first failure. The watchdog that CreateProcessGroup puts around each group
// (backends/watch) reports which rank caused the failure.
class HierBackend : public c10d::Backend {
 public:
  struct Config {
    Topology topology;
    Parts parts;
    std::vector<std::string> host_names;  // by host, for error messages
    std::chrono::milliseconds timeout;
    HierOptions options;
    // Makes a group of a subset of the ranks, for split. `rank` is this rank's number in it.
    std::function<absl::StatusOr<c10::intrusive_ptr<c10d::Backend>>(
        const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
        std::chrono::milliseconds timeout)>
        create;
  };
  explicit HierBackend(Config config);
  // Pending collectives fail.
  ~HierBackend() override;

  const std::string getBackendName() const override { return "hier"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return queue_.submitted(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Memory of the local part; the arena, if that is shm.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_sizes,
                                                   std::vector<int64_t>& input_sizes,
                                                   const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  using Body = std::function<void(absl::Time deadline)>;
  CallName NameCall(const char* operation) const { return {operation, getRank(), getSize()}; }
  // `title` is a literal, for messages. kUnsetTimeout means the group's timeout.
  c10::intrusive_ptr<c10d::Work> Submit(c10d::OpType op, const char* title,
                                        std::chrono::milliseconds timeout,
                                        std::vector<at::Tensor> outputs, Body body);
  // Submits an operation of the flat group; `start` makes the call there.
  c10::intrusive_ptr<c10d::Work> SubmitFlat(c10d::OpType op, const char* title,
                                            std::chrono::milliseconds timeout,
                                            std::vector<at::Tensor> outputs,
                                            std::function<c10::intrusive_ptr<c10d::Work>()> start);

  using TensorLists = std::vector<std::vector<at::Tensor>>;
  c10::intrusive_ptr<c10d::Work> Allreduce(c10d::OpType op, const CallName& call,
                                           std::vector<at::Tensor> tensors,
                                           const c10d::AllreduceOptions& options);
  // outputs[i][rank] receives inputs[i] of `rank`. If outputs are slices of larger tensors,
  // `wholes` are these tensors.
  c10::intrusive_ptr<c10d::Work> Allgather(c10d::OpType op, const CallName& call,
                                           std::vector<at::Tensor> results, TensorLists outputs,
                                           std::vector<at::Tensor> inputs,
                                           std::chrono::milliseconds timeout,
                                           std::vector<Flat> wholes = {});
  // outputs[i] on `rank` receives the reduction of inputs[i][rank].
  c10::intrusive_ptr<c10d::Work> ReduceScatter(c10d::OpType op, const CallName& call,
                                               std::vector<at::Tensor> outputs, TensorLists inputs,
                                               const c10d::ReduceScatterOptions& options);
  void RunPipeline(std::vector<Item> items, const HierReduction* reduction, absl::Time deadline);
  void RunAllreduce(const std::vector<at::Tensor>& tensors, const HierReduction& reduction,
                    absl::Time deadline);
  int64_t ChunkBytes() const;

  std::string Where() const;  // "rank 3 on host 1 (name)"
  [[noreturn]] void Fail(const std::string& message);
  void ThrowIfBroken();
  // Aborts all parts, once.
  void Break(const std::string& message);

  const Config config_;
  const Topology& topology_;
  Parts parts_;
  const c10::intrusive_ptr<Options> options_;
  SplitPrefixes splits_;

  std::mutex mutex_;
  std::string broken_;  // the failure of the group; empty: none

  Link link_;  // used by the queue's thread only
  WorkQueue queue_;
};

}  // namespace ddp::backends::hier
