// c10d's ProcessGroupGloo with additions that it lacks as of LibTorch 2.15.
//
//   auto backend = c10::make_intrusive<GlooBackend>(store, rank, size, gloo_options, join_timeout);
//   backend->allgather(outputs_of_int16, inputs)->wait();
//
//   - Dtypes that Gloo does not support (16-bit and unsigned integers, 8-bit floats, complex
//     numbers): moved as bytes, and reduced in a wider dtype where there is one (reduction_plan.h).
//   - Averages of integers, premul-sum, sums of bool (which Gloo adds as bytes).
//   - alltoall, and allgather of different sizes.
//   - Tensors with gaps between their elements. Gloo's allreduce, reduce, broadcast and scatter
//     also read and write the gaps.
//   - abort() and getError().
//   - A monitored barrier whose messages no receive of the caller can match. c10d sends them with
//     small tags, which callers may use, too. Tags from 2^31 - 2^20 - 1 are reserved for the
//     barrier and for abort.
//   - Futures of reduce_scatter in all forms.
//   - All calls with tensors of other devices, through copies in the CPU's memory: for ranks that
//   share
//     a GPU, which nccl refuses. The calling thread waits for the copy of its inputs, and Gloo's
//     thread for that of the outputs. ProcessGroupGloo takes such tensors in some calls only.
//   - split of a group whose ranks are not the first ones of the job.
//   - Coalesced allgathers and the sparse allreduce of CPU tensors, implemented with other
//     collectives. ProcessGroupGloo's own corrupt the heap: its threads assign the name of the
//     completed collective to one std::string (ProcessGroupStatus::lastCompletedWorkName), without
//     a lock. Two that complete at the same time free the same memory if a name is longer than the
//     string's internal buffer of 15 characters, as ALLGATHER_COALESCED and _ALLREDUCE_SPARSE are.
//
// Other calls are passed to ProcessGroupGloo unchanged, after a check of dtype and layout. The
// additions are asynchronous too, but for the sparse allreduce (common/sparse.h): the caller's
// thread copies inputs, Gloo's thread copies outputs.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "backends/common/split_prefixes.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"

namespace ddp::backends::gloo {

// Thread safety, ownership and which calls are collective: as for ProcessGroupGloo.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  // `join_timeout`: maximum wait for the other members of a group that split or merge makes.
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              c10::intrusive_ptr<Options> options, absl::Duration join_timeout)
      : ProcessGroupGloo(store, rank, size, std::move(options)), join_timeout_(join_timeout) {}

  // Closes all connections: pending operations of this rank, and those of peers that wait for this
  // rank, fail at once. Thread-safe.
  void abort() override;
  // COMM_ERROR after abort(). Failures of operations are not recorded: their works have them.
  // Thread-safe.
  c10d::ErrorType getError() override;

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
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& opts) override;
  // all_gather_single comes here as well.
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_splits,
                                                   std::vector<int64_t>& input_splits,
                                                   const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;

 private:
  // split and merge use this. Returns a copy of `opts`, which may be this group's own, with this
  // group's devices and threads and without global ranks.
  c10::intrusive_ptr<Options> OptionsOfNewGroup(const Backend::Options& opts);

  // All-reduces the concatenation of `inputs`, then copies to each output its part.
  struct Part {
    int64_t offset;  // of its first element in the concatenation
    at::Tensor output;
  };
  c10::intrusive_ptr<c10d::Work> ReduceParts(c10d::OpType type, const char* name,
                                             const std::vector<at::Tensor>& inputs,
                                             std::vector<Part> parts, const c10d::ReduceOp& op,
                                             std::chrono::milliseconds timeout);
  // Gathers the concatenation of `inputs`, then copies rank r's to `parts[r]`, and calls `last`.
  // All are one-dimensional tensors of bytes, of the same sizes on all ranks.
  c10::intrusive_ptr<c10d::Work> GatherParts(const std::vector<at::Tensor>& inputs,
                                             std::vector<std::vector<at::Tensor>> parts,
                                             std::vector<std::vector<at::Tensor>> outputs,
                                             std::function<void()> last,
                                             const c10d::AllgatherOptions& opts);

  c10::intrusive_ptr<c10d::Work> Remember(c10::intrusive_ptr<c10d::Work> message);

  const absl::Duration join_timeout_;
  SplitPrefixes splits_;
  std::atomic<bool> aborted_{false};
  // Messages of pending monitored barriers, which nothing else keeps alive.
  std::mutex barriers_mutex_;
  int barriers_ = 0;
  std::vector<c10::intrusive_ptr<c10d::Work>> barrier_messages_;
};

}  // namespace ddp::backends::gloo
