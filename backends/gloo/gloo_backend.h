// c10d's ProcessGroupGloo with what it lacks, as of LibTorch 2.11.
//
//   auto backend = c10::make_intrusive<GlooBackend>(store, rank, size, gloo_options);
//   backend->allgather(outputs_of_int16, inputs)->wait();
//
//   - Dtypes that Gloo refuses (16-bit and unsigned integers, 8-bit floats, complex numbers) are
//     moved as bytes, and reduced in a wider dtype where there is one (reduction.h).
//   - Averages of integers, premul-sum, sums of bool (which Gloo adds as bytes).
//   - alltoall, and allgather of different sizes.
//   - Tensors with gaps between their elements: Gloo's allreduce, reduce, broadcast and scatter
//     read and write straight on, through the gaps.
//   - abort().
//   - A monitored barrier whose messages no receive of the caller's can take: c10d sends them with
//     small tags, as a caller does. Tags from 2^31 - 2^20 - 1 on are kept for that and for abort.
//   - Futures of reduce_scatter in all its forms; a split of a group whose ranks are not the
//     process's first.
//
// All else goes to ProcessGroupGloo untouched, after a look at dtype and layout. What does not is
// asynchronous as well: copies in are made by the caller's thread, copies out by Gloo's.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/common/split_prefixes.h"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"

namespace ddp::backends::gloo {

// Thread safety, ownership and which calls are collective: as of ProcessGroupGloo.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  // Closes all connections: what waits here fails at once, as does, at the other end, what waits
  // for this rank. Thread-safe.
  void abort() override;

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Backend::Options>& opts,
                                          const int& rank, const int& size) override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  // _allgather_base comes here as well.
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;

 private:
  // One allreduce of all `inputs`, end to end, then of each output its part.
  struct Part {
    int64_t offset;  // of its first element in the concatenation
    at::Tensor output;
  };
  c10::intrusive_ptr<c10d::Work> ReduceParts(c10d::OpType type,
                                             const std::vector<at::Tensor>& inputs,
                                             std::vector<Part> parts,
                                             const c10d::ReduceScatterOptions& opts);

  c10::intrusive_ptr<c10d::Work> Remember(c10::intrusive_ptr<c10d::Work> message);

  SplitPrefixes splits_;
  std::atomic<bool> aborted_{false};
  // Messages of monitored barriers under way: nobody else has them.
  std::mutex barriers_mutex_;
  int barriers_ = 0;
  std::vector<c10::intrusive_ptr<c10d::Work>> barrier_messages_;
};

}  // namespace ddp::backends::gloo
