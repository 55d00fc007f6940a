// Backend `mpi`: c10d's collectives over the MPI installed on the machine, for CPU tensors.
//
//   mpirun -n 4 bazel-bin/tools/train --backend=mpi
//
// No other rendezvous is needed: the ranks agree on the address of their store through MPI
// (master.h).
//
// Asynchronous: a call passes its operation to the one thread that calls MPI (runtime.h). The
// collectives of a group run one after another, messages concurrently with them.
//
// Errors: wrong arguments throw c10::Error from the call (tensor_checks.h). MPI's errors and
// timeouts fail the Work with a c10::DistBackendError that names operation, rank and, if known, the
// ranks whose messages are missing. After a failure the group cannot be used any more. MPI cannot
// cancel what it has started: after a timeout it may still write to the tensors, which are kept
// alive. If a rank dies, mpirun ends all other ranks.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/common/split_prefixes.h"
#include "backends/common/staging.h"
#include "backends/common/tensor_checks.h"
#include "backends/mpi/collectives.h"
#include "backends/mpi/mpi_group.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::mpi {

// Collective over options.rank.world_size ranks, any subset of the ranks of the mpirun.
// FailedPrecondition if mpirun has not started the process; DeadlineExceeded names the ranks that
// have not joined within options.group.join_timeout.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateMpi(const BackendOptions& options);

// Thread-safe; collectives must be called in the same order on all ranks. Accepts the arguments
// that c10d's Gloo accepts and, in addition, outputs of different sizes and tensors of any strides.
class MpiBackend : public c10d::Backend {
 public:
  // `join_timeout`: maximum wait for the other members of a group that split makes.
  MpiBackend(std::shared_ptr<MpiGroup> group, absl::Duration timeout, absl::Duration join_timeout);

  const std::string getBackendName() const override { return "mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsSplitting() const override { return true; }
  // Collective over `ranks`; null on other ranks, which need not call.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  // SUCCESS until an operation fails or abort() is called; then TIMEOUT or COMM_ERROR, by the first
  // failure.
  c10d::ErrorType getError() override;
  // Fails all pending and later operations, on this rank only.
  void abort() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_number_; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Collective. Returns when all ranks have called it. After the timeout it throws, on every rank
  // that has called it, and names all ranks that have not, whatever `wait_all_ranks` is.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // The properties of an operation.
  struct Call {
    c10d::OpType type;
    const char* title;  // for the profiler and errors; a literal, "mpi:all_reduce"
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    Tensors inputs = {};                // for the profiler and errors
    std::vector<Tensors> outputs = {};  // value of the future
    bool is_collective = true;
    std::function<std::string(Channel&)> on_timeout = nullptr;
  };

  // Submits `body` to the group. `staging` is kept as long as MPI uses its memory, and copied back
  // on success.
  WorkPtr Submit(Call call, std::shared_ptr<Staging> staging,
                 std::function<Coroutine(Channel&)> body);
  WorkPtr AllReduceEach(Call call, c10d::ReduceOp op);
  WorkPtr ReduceScatterEach(Call call, Tensors& outputs, Tensors& inputs, c10d::ReduceOp op);
  WorkPtr AllGatherEach(Call call, Tensors& outputs, Tensors& inputs);
  WorkPtr ReceiveFrom(const CallName& call, Tensors& tensors, c10d::OpType type, int from, int tag);

  CallName NameCall(const char* operation) const { return {operation, getRank(), getSize()}; }
  void CheckTag(const CallName& call, int tag) const;

  const std::shared_ptr<MpiGroup> group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  const absl::Duration join_timeout_;
  std::atomic<uint64_t> sequence_number_{0};
  SplitPrefixes splits_;
};

}  // namespace ddp::backends::mpi
