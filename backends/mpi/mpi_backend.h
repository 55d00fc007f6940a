// Backend `mpi`: c10d's collectives over the machine's own MPI, for CPU tensors.
//
//   mpirun -n 4 bazel-bin/tools/train --backend=mpi
//
// No other rendezvous is needed: MPI tells the ranks where their store is (see master.h).
//
// Asynchronous: a call hands its operation to the one thread that speaks to MPI (runtime.h). The
// collectives of a group run one after another, messages beside them. A collective may be called
// from any thread, if all ranks call in one order.
//
// Failures. MPI's errors, and timeouts, fail the work with a c10::DistBackendError that names
// operation and rank, and whose message is missing where that can be told. MPI cannot take back
// what it has begun: after a timeout it may still write into the tensors, which are kept alive for
// it, and the group is broken. A rank that dies takes the job with it: mpirun ends all others.
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
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace ddp::backends::mpi {

// Collective over options.rank.world_size ranks, any subset of the mpirun's. FailedPrecondition
// where no mpirun has started the process; DeadlineExceeded names ranks that do not come.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateMpi(const BackendOptions& options);

// Thread safe. As c10d's Gloo checks its arguments, with more that is taken: outputs of different
// sizes, any strides.
class MpiBackend : public c10d::Backend {
 public:
  MpiBackend(std::shared_ptr<MpiGroup> group, absl::Duration timeout);

  const std::string getBackendName() const override { return "mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsSplitting() const override { return true; }
  // Collective over `ranks`; null on others, which need not call.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  // Everything under way, and all that comes later, fails on this rank.
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
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Returns when all ranks have called it; otherwise throws, on every rank that has, and names
  // those that have not (all of them, whatever `wait_all_ranks` says).
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // What differs between operations.
  struct Call {
    c10d::OpType type;
    const char* title;  // for the profiler, and errors; a literal
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    Tensors inputs = {};                // for the profiler, and errors
    std::vector<Tensors> outputs = {};  // the future's value
    bool is_collective = true;
    std::function<std::string(Channel&)> on_timeout = nullptr;
  };

  // Runs `body` in its turn; `staging` lives as long as MPI needs it.
  WorkPtr Submit(Call call, std::shared_ptr<Staging> staging, std::function<Task(Channel&)> body);
  WorkPtr AllReduceEach(Call call, c10d::ReduceOp op);
  WorkPtr ReduceScatterEach(Call call, Tensors& outputs, Tensors& inputs, c10d::ReduceOp op);
  WorkPtr AllGatherEach(Call call, Tensors& outputs, Tensors& inputs);
  WorkPtr ReceiveFrom(const CallName& call, Tensors& tensors, c10d::OpType type, int from, int tag);

  CallName NameCall(const char* title) const { return {title, getRank(), getSize()}; }
  void CheckTag(const CallName& call, int tag) const;

  const std::shared_ptr<MpiGroup> group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_number_{0};
  SplitPrefixes splits_;
};

}  // namespace ddp::backends::mpi
