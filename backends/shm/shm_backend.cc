#include "backends/shm/shm_backend.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/common/sparse.h"
#include "backends/shm/convert.h"
#include "backends/shm/options.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::shm {
namespace {

using c10d::OpType;

Request ReduceRequest(Kind kind, const Reduction& reduction, const Buffer& buffer) {
  Request request;
  request.kind = kind;
  request.reduction = reduction;
  request.tensor = buffer.data;
  request.count = buffer.bytes / ElementSize(reduction.dtype);
  return request;
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> ShmBackend::Create(
    const BackendOptions& options) {
  ShmJoinOptions join;
  join.rank = options.rank.rank;
  join.world_size = options.rank.world_size;
  const auto shm = options.group.implementations.Get<ShmOptions>("shm");
  join.limits = {shm.segment_bytes(), shm.arena_bytes()};
  join.deadline = absl::Now() + options.group.join_timeout;
  join.set = [&](const std::string& key, const std::string& value) {
    return CatchStatus(key, [&] { options.store->set(key, value); });
  };
  join.get = [&](const std::string& key) {
    return CatchStatus(key, [&] {
      const absl::Duration left = std::max(absl::Milliseconds(1), join.deadline - absl::Now());
      options.store->wait({key}, absl::ToChronoMilliseconds(left));
      return options.store->get_to_str(key);
    });
  };
  DDP_ASSIGN_OR_RETURN(std::shared_ptr<ShmGroup> group, ShmGroup::Join(join));
  return c10::intrusive_ptr<c10d::Backend>(
      c10::make_intrusive<ShmBackend>(std::move(group), options));
}

ShmBackend::ShmBackend(std::shared_ptr<ShmGroup> group, BackendOptions options)
    : c10d::Backend(group->rank(), group->world_size()),
      group_(std::move(group)),
      options_(std::move(options)),
      c10d_options_(
          c10::make_intrusive<Options>("shm", absl::ToChronoMilliseconds(options_.group.timeout))),
      timeout_ms_(absl::ToInt64Milliseconds(options_.group.timeout)) {}

ShmBackend::~ShmBackend() { shutdown(); }

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
}

c10d::ErrorType ShmBackend::getError() {
  const absl::Status failure = group_->engine().failure();
  if (failure.ok()) return c10d::ErrorType::SUCCESS;
  return absl::IsDeadlineExceeded(failure) ? c10d::ErrorType::TIMEOUT
                                           : c10d::ErrorType::REMOTE_ERROR;
}

void ShmBackend::abort() {
  group_->engine().Abort(absl::AbortedError(absl::StrCat("rank ", rank_, " aborted the group")));
}

void ShmBackend::shutdown() {
  if (!left_.exchange(true)) group_->Leave();
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto here = std::find(ranks.begin(), ranks.end(), rank_);
  if (here == ranks.end()) return nullptr;
  BackendOptions sub = options_;
  sub.store = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  sub.rank.rank = static_cast<int>(here - ranks.begin());
  sub.rank.world_size = static_cast<int>(ranks.size());
  if (options) sub.group.timeout = absl::FromChrono(options->timeout);
  absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> made = Create(sub);
  TORCH_CHECK(made.ok(), "shm: splitting off ranks ", absl::StrJoin(ranks, ", "), ": ",
              std::string(made.status().message()));
  return *std::move(made);
}

bool ShmBackend::supportsTensorAlloc(c10::DeviceIndex) { return group_->arena() != nullptr; }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  Arena* arena = group_->arena();
  const size_t bytes = size * options.dtype().itemsize();
  std::byte* block =
      arena == nullptr || !options.device().is_cpu() ? nullptr : arena->Allocate(bytes);
  if (block == nullptr) return at::empty({size}, options);
  // The tensor may outlive the backend.
  return at::from_blob(
      block, {size},
      [group = group_](void* data) { group->arena()->Free(static_cast<std::byte*>(data)); },
      options);
}

ShmBackend::WorkRef ShmBackend::NewWork(OpType type, const char* title) {
  return c10::make_intrusive<ShmWork>(group_, type, title);
}

ShmBackend::WorkPtr ShmBackend::Start(WorkRef work, Tensors outputs,
                                      std::chrono::milliseconds timeout) {
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (timeout == c10d::kUnsetTimeout || timeout == kNoTimeout) {
    timeout = std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  work->Start(std::move(outputs), timeout);
  return work;
}

void ShmBackend::CheckRoot(int64_t root, const char* what) const {
  TORCH_CHECK(root >= 0 && root < size_, "shm: ", what, ": root ", root,
              " is no rank of a group of ", size_);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = OnlyTensor(tensors, "broadcast");
  CheckRoot(options.rootRank, "broadcast");
  WorkRef work = NewWork(OpType::BROADCAST, "shm:broadcast");
  const Buffer buffer = work->tensors().InOut(tensor);
  Request request;
  request.kind = Kind::kBroadcast;
  request.reduction.dtype = ElementOf(tensor);
  request.root = static_cast<int>(options.rootRank);
  request.tensor = buffer.data;
  request.count = buffer.bytes;
  work->requests.push_back(std::move(request));
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (IsSparse(tensors)) return SparseAllReduce(*this, tensors, options);
  const at::Tensor& tensor = OnlyTensor(tensors, "allreduce");
  const Reduction reduction = ReductionFor(options.reduceOp, tensor.scalar_type(), size_);
  WorkRef work = NewWork(OpType::ALLREDUCE, "shm:all_reduce");
  work->requests.push_back(
      ReduceRequest(Kind::kAllReduce, reduction, work->tensors().InOut(tensor, options.reduceOp)));
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  WorkRef work = NewWork(OpType::ALLREDUCE_COALESCED, "shm:all_reduce");
  for (const at::Tensor& tensor : tensors) {
    CheckTensor(tensor, "allreduce_coalesced");
    const Reduction reduction = ReductionFor(options.reduceOp, tensor.scalar_type(), size_);
    work->requests.push_back(ReduceRequest(Kind::kAllReduce, reduction,
                                           work->tensors().InOut(tensor, options.reduceOp)));
  }
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = OnlyTensor(tensors, "reduce");
  CheckRoot(options.rootRank, "reduce");
  const Reduction reduction = ReductionFor(options.reduceOp, tensor.scalar_type(), size_);
  WorkRef work = NewWork(OpType::REDUCE, "shm:reduce");
  const Buffer buffer = options.rootRank == rank_ ? work->tensors().InOut(tensor, options.reduceOp)
                                                  : work->tensors().In(tensor, options.reduceOp);
  Request request = ReduceRequest(Kind::kReduce, reduction, buffer);
  request.root = static_cast<int>(options.rootRank);
  work->requests.push_back(std::move(request));
  return Start(std::move(work), tensors, options.timeout);
}

void ShmBackend::AddAllGather(ShmWork& work, const at::Tensor& input,
                              const Tensors& outputs) const {
  CheckTensor(input, "allgather");
  TORCH_CHECK(static_cast<int>(outputs.size()) == size_, "shm: allgather: ", outputs.size(),
              " outputs for ", size_, " ranks");
  TORCH_CHECK(outputs[rank_].nbytes() == input.nbytes(), "shm: allgather: rank ", rank_,
              " puts in ", input.nbytes(), " bytes, and has room for ", outputs[rank_].nbytes(),
              " of its own");
  Request request;
  request.kind = Kind::kAllGather;
  request.reduction.dtype = ElementOf(input);
  request.send.push_back(work.tensors().In(input));
  for (const at::Tensor& output : outputs) {
    CheckTensor(output, "allgather");
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "shm: allgather: the input is ",
                input.scalar_type(), ", an output ", output.scalar_type());
    request.recv.push_back(work.tensors().Out(output));
  }
  work.requests.push_back(std::move(request));
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = OnlyTensor(inputs, "allgather");
  TORCH_CHECK(outputs.size() == 1, "shm: allgather: one list of outputs, not ", outputs.size());
  WorkRef work = NewWork(OpType::ALLGATHER, "shm:all_gather");
  AddAllGather(*work, input, outputs[0]);
  return Start(std::move(work), outputs[0], options.timeout);
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& output_lists, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // One list per rank, of one tensor per input.
  TORCH_CHECK(static_cast<int>(output_lists.size()) == size_,
              "shm: allgather_coalesced: ", output_lists.size(), " lists of outputs for ", size_,
              " ranks");
  WorkRef work = NewWork(OpType::ALLGATHER_COALESCED, "shm:all_gather");
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors outputs;
    for (const Tensors& list : output_lists) {
      TORCH_CHECK(list.size() == inputs.size(), "shm: allgather_coalesced: ", list.size(),
                  " outputs of a rank for ", inputs.size(), " inputs");
      outputs.push_back(list[i]);
    }
    AddAllGather(*work, inputs[i], outputs);
    all.insert(all.end(), outputs.begin(), outputs.end());
  }
  return Start(std::move(work), std::move(all), options.timeout);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "shm: allgather_into_tensor: ", outputs.size(),
              " outputs for ", inputs.size(), " inputs");
  WorkRef work = NewWork(OpType::_ALLGATHER_BASE, "shm:all_gather");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(inputs[i], "allgather_into_tensor");
    CheckTensor(outputs[i], "allgather_into_tensor");
    TORCH_CHECK(outputs[i].scalar_type() == inputs[i].scalar_type() &&
                    outputs[i].numel() == inputs[i].numel() * size_,
                "shm: allgather_into_tensor: ", inputs[i].numel(), " x ", inputs[i].scalar_type(),
                " of each of ", size_, " ranks do not make ", outputs[i].numel(), " x ",
                outputs[i].scalar_type());
    const Buffer whole = work->tensors().Out(outputs[i]);
    Request request;
    request.kind = Kind::kAllGather;
    request.reduction.dtype = ElementOf(inputs[i]);
    request.send.push_back(work->tensors().In(inputs[i]));
    const size_t each = inputs[i].nbytes();
    request.recv.reserve(size_);
    for (int rank = 0; rank < size_; ++rank) {
      request.recv.push_back({whole.data + rank * each, each});
    }
    work->requests.push_back(std::move(request));
  }
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor& input = OnlyTensor(inputs, "gather");
  CheckRoot(options.rootRank, "gather");
  const bool root = options.rootRank == rank_;
  TORCH_CHECK(
      root ? outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_ : outputs.empty(),
      "shm: gather: the root has one output per rank, the others none");
  WorkRef work = NewWork(OpType::GATHER, "shm:gather");
  Request request;
  request.kind = Kind::kGather;
  request.reduction.dtype = ElementOf(input);
  request.root = static_cast<int>(options.rootRank);
  request.send.resize(size_);
  request.recv.resize(size_);
  request.send[request.root] = work->tensors().In(input);
  for (int rank = 0; root && rank < size_; ++rank) {
    CheckTensor(outputs[0][rank], "gather");
    request.recv[rank] = work->tensors().Out(outputs[0][rank]);
  }
  TORCH_CHECK(!root || request.recv[rank_].bytes == input.nbytes(),
              "shm: gather: the root's own input and output differ in size");
  work->requests.push_back(std::move(request));
  return Start(std::move(work), root ? outputs[0] : Tensors(), options.timeout);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor& output = OnlyTensor(outputs, "scatter");
  CheckRoot(options.rootRank, "scatter");
  const bool root = options.rootRank == rank_;
  TORCH_CHECK(
      root ? inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_ : inputs.empty(),
      "shm: scatter: the root has one input per rank, the others none");
  WorkRef work = NewWork(OpType::SCATTER, "shm:scatter");
  Request request;
  request.kind = Kind::kScatter;
  request.reduction.dtype = ElementOf(output);
  request.root = static_cast<int>(options.rootRank);
  request.send.resize(size_);
  request.recv.resize(size_);
  request.recv[request.root] = work->tensors().Out(output);
  for (int rank = 0; root && rank < size_; ++rank) {
    CheckTensor(inputs[0][rank], "scatter");
    request.send[rank] = work->tensors().In(inputs[0][rank]);
  }
  TORCH_CHECK(!root || request.send[rank_].bytes == output.nbytes(),
              "shm: scatter: the root's own input and output differ in size");
  work->requests.push_back(std::move(request));
  return Start(std::move(work), outputs, options.timeout);
}

void ShmBackend::AddReduceScatter(ShmWork& work, const Tensors& inputs, const at::Tensor& output,
                                  const c10d::ReduceOp& op) const {
  CheckTensor(output, "reduce_scatter");
  TORCH_CHECK(static_cast<int>(inputs.size()) == size_, "shm: reduce_scatter: ", inputs.size(),
              " inputs for ", size_, " ranks");
  const Reduction reduction = ReductionFor(op, output.scalar_type(), size_);
  // The output may be part of the input, as it is when a flat gradient keeps its own shard: then
  // all but its own slice is only read.
  Request request = ReduceRequest(Kind::kReduceScatter, reduction, work.tensors().Out(output, op));
  for (const at::Tensor& input : inputs) {
    CheckTensor(input, "reduce_scatter");
    TORCH_CHECK(input.scalar_type() == output.scalar_type() && input.numel() == output.numel(),
                "shm: reduce_scatter: an input of ", input.numel(), " x ", input.scalar_type(),
                " for an output of ", output.numel(), " x ", output.scalar_type(),
                "; all must be equal");
    request.send.push_back(work.tensors().In(input, op));
  }
  work.requests.push_back(std::move(request));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = OnlyTensor(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1, "shm: reduce_scatter: one list of inputs, not ", inputs.size());
  WorkRef work = NewWork(OpType::REDUCE_SCATTER, "shm:reduce_scatter");
  AddReduceScatter(*work, inputs[0], output, options.reduceOp);
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "shm: reduce_scatter_tensor: ", outputs.size(),
              " outputs for ", inputs.size(), " inputs");
  WorkRef work = NewWork(OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(inputs[i], "reduce_scatter_tensor");
    CheckTensor(outputs[i], "reduce_scatter_tensor");
    TORCH_CHECK(inputs[i].scalar_type() == outputs[i].scalar_type() &&
                    inputs[i].numel() == outputs[i].numel() * size_,
                "shm: reduce_scatter_tensor: ", inputs[i].numel(), " x ", inputs[i].scalar_type(),
                " do not make ", outputs[i].numel(), " x ", outputs[i].scalar_type(),
                " on each of ", size_, " ranks");
    const Reduction reduction = ReductionFor(options.reduceOp, outputs[i].scalar_type(), size_);
    Request request = ReduceRequest(Kind::kReduceScatter, reduction,
                                    work->tensors().Out(outputs[i], options.reduceOp));
    const Buffer whole = work->tensors().In(inputs[i], options.reduceOp);
    const size_t each = whole.bytes / size_;
    request.send.reserve(size_);
    for (int rank = 0; rank < size_; ++rank) {
      request.send.push_back({whole.data + rank * each, each});
    }
    work->requests.push_back(std::move(request));
  }
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  TORCH_CHECK(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
              "shm: alltoall: ", inputs.size(), " inputs and ", outputs.size(), " outputs for ",
              size_, " ranks");
  TORCH_CHECK(outputs[rank_].nbytes() == inputs[rank_].nbytes(),
              "shm: alltoall: this rank's part for itself differs in size");
  WorkRef work = NewWork(OpType::ALLTOALL, "shm:all_to_all");
  Request request;
  request.kind = Kind::kAllToAll;
  request.reduction.dtype = ElementOf(inputs[rank_]);
  for (int rank = 0; rank < size_; ++rank) {
    CheckTensor(inputs[rank], "alltoall");
    CheckTensor(outputs[rank], "alltoall");
    request.send.push_back(work->tensors().In(inputs[rank]));
    request.recv.push_back(work->tensors().Out(outputs[rank]));
  }
  work->requests.push_back(std::move(request));
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  CheckTensor(input, "alltoall_base");
  CheckTensor(output, "alltoall_base");
  TORCH_CHECK(input.scalar_type() == output.scalar_type(), "shm: alltoall_base: the input is ",
              input.scalar_type(), ", the output ", output.scalar_type());
  // Along the first dimension; none given means equal parts.
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  WorkRef work = NewWork(OpType::ALLTOALL_BASE, "shm:all_to_all");
  const auto parts = [this](const Buffer& whole, const at::Tensor& tensor,
                            const std::vector<int64_t>& splits) {
    std::vector<Buffer> result;
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const size_t row_bytes = rows == 0 ? 0 : whole.bytes / rows;
    std::byte* at = whole.data;
    for (int rank = 0; rank < size_; ++rank) {
      const size_t bytes = (splits.empty() ? rows / size_ : splits[rank]) * row_bytes;
      result.push_back({at, bytes});
      at += bytes;
    }
    return result;
  };
  Request request;
  request.kind = Kind::kAllToAll;
  request.reduction.dtype = ElementOf(input);
  request.send = parts(work->tensors().In(input), input, input_splits);
  request.recv = parts(work->tensors().Out(output), output, output_splits);
  TORCH_CHECK(request.send[rank_].bytes == request.recv[rank_].bytes,
              "shm: alltoall_base: this rank's part for itself differs in size");
  work->requests.push_back(std::move(request));
  return Start(std::move(work), {output}, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::Message(Kind kind, Tensors& tensors, int peer, int tag) {
  const at::Tensor& tensor = OnlyTensor(tensors, Name(kind));
  const bool send = kind == Kind::kSend;
  TORCH_CHECK((peer >= 0 && peer < size_ && peer != rank_) || (!send && peer == kAnySource),
              "shm: ", Name(kind), ": rank ", peer, " is no other rank of a group of ", size_);
  TORCH_CHECK(tag >= 0, "shm: ", Name(kind), ": tag ", tag, " is negative");
  WorkRef work = NewWork(send                 ? OpType::SEND
                         : peer == kAnySource ? OpType::RECVANYSOURCE
                                              : OpType::RECV,
                         send ? "shm:send" : "shm:recv");
  const Buffer buffer = send ? work->tensors().In(tensor) : work->tensors().Out(tensor);
  Request request;
  request.kind = kind;
  request.root = peer;
  request.tag = tag;
  request.tensor = buffer.data;
  request.count = buffer.bytes;
  work->requests.push_back(std::move(request));
  return Start(std::move(work), send ? Tensors() : tensors, c10d::kUnsetTimeout);
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  return Message(Kind::kSend, tensors, to, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return Message(Kind::kRecv, tensors, from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return Message(Kind::kRecv, tensors, kAnySource, tag);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  WorkRef work = NewWork(OpType::BARRIER, "shm:barrier");
  work->requests.push_back(Request());
  return Start(std::move(work), {}, options.timeout);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  // A barrier that fails names all who are missing, so waiting for all of them or for the first is
  // the same here.
  barrier(options)->wait(kNoTimeout);
}

}  // namespace ddp::backends::shm
