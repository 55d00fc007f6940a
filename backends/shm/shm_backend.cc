#include "backends/shm/shm_backend.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/common/reduction.h"
#include "backends/common/sparse.h"
#include "backends/shm/options.h"
#include "base/status.h"
#include "third_party/libtorch/compat.h"
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

// The dtype that the ranks compare. Dtypes without kernels, which are only moved, count as bytes.
DType DTypeToCompare(const at::Tensor& tensor) {
  return ToDType(tensor.scalar_type()).value_or(DType::kUInt8);
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
  if (!shut_down_.exchange(true)) group_->Leave();
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
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (c10::isComplexType(dtype)) {
    size *= 2;
    options = options.dtype(c10::toRealValueType(dtype));
  }
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

ShmBackend::WorkRef ShmBackend::NewWork(OpType type, const CallName& call) {
  return c10::make_intrusive<ShmWork>(group_, type, call.operation);
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

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const CallName call = NameCall("shm:broadcast");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  WorkRef work = NewWork(OpType::BROADCAST, call);
  const Buffer buffer = work->tensors().InOut(tensor);
  Request request;
  request.kind = Kind::kBroadcast;
  request.reduction.dtype = DTypeToCompare(tensor);
  request.root = static_cast<int>(options.rootRank);
  request.tensor = buffer.data;
  request.count = buffer.bytes;
  work->requests.push_back(std::move(request));
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (IsSparse(tensors)) return SparseAllReduce(*this, tensors, options);
  const CallName call = NameCall("shm:all_reduce");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  const Reduction reduction = CheckReduction(call, options.reduceOp, tensor.scalar_type());
  WorkRef work = NewWork(OpType::ALLREDUCE, call);
  work->requests.push_back(
      ReduceRequest(Kind::kAllReduce, reduction, work->tensors().InOut(tensor, options.reduceOp)));
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const CallName call = NameCall("shm:all_reduce");
  WorkRef work = NewWork(OpType::ALLREDUCE_COALESCED, call);
  for (const at::Tensor& tensor : tensors) {
    CheckTensor(call, tensor);
    const Reduction reduction = CheckReduction(call, options.reduceOp, tensor.scalar_type());
    work->requests.push_back(ReduceRequest(Kind::kAllReduce, reduction,
                                           work->tensors().InOut(tensor, options.reduceOp)));
  }
  return Start(std::move(work), tensors, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const CallName call = NameCall("shm:reduce");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  const Reduction reduction = CheckReduction(call, options.reduceOp, tensor.scalar_type());
  WorkRef work = NewWork(OpType::REDUCE, call);
  const Buffer buffer = options.rootRank == rank_ ? work->tensors().InOut(tensor, options.reduceOp)
                                                  : work->tensors().In(tensor, options.reduceOp);
  Request request = ReduceRequest(Kind::kReduce, reduction, buffer);
  request.root = static_cast<int>(options.rootRank);
  work->requests.push_back(std::move(request));
  return Start(std::move(work), tensors, options.timeout);
}

void ShmBackend::AddAllGather(const CallName& call, ShmWork& work, const at::Tensor& input,
                              const Tensors& outputs) const {
  CheckOnePerRank(call, "outputs", outputs.size());
  CheckSameSize(call, input, outputs[rank_]);
  Request request;
  request.kind = Kind::kAllGather;
  request.reduction.dtype = DTypeToCompare(input);
  request.send.push_back(work.tensors().In(input));
  for (const at::Tensor& output : outputs) {
    CheckSameDtype(call, input, output);
    request.recv.push_back(work.tensors().Out(output));
  }
  work.requests.push_back(std::move(request));
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("shm:all_gather");
  const at::Tensor& input = CheckSingleTensor(call, inputs);
  CheckSingleList(call, "outputs", outputs);
  WorkRef work = NewWork(OpType::ALLGATHER, call);
  AddAllGather(call, *work, input, outputs[0]);
  return Start(std::move(work), outputs[0], options.timeout);
}

ShmBackend::WorkPtr ShmBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return all_gather_single_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& output_lists, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  // One list per rank, of one tensor per input.
  const CallName call = NameCall("shm:all_gather");
  CheckOnePerRank(call, "lists of outputs", output_lists.size());
  WorkRef work = NewWork(OpType::ALLGATHER_COALESCED, call);
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors outputs;
    for (const Tensors& list : output_lists) {
      CheckSameCount(call, inputs.size(), list.size());
      outputs.push_back(list[i]);
    }
    AddAllGather(call, *work, inputs[i], outputs);
    all.insert(all.end(), outputs.begin(), outputs.end());
  }
  return Start(std::move(work), std::move(all), options.timeout);
}

ShmBackend::WorkPtr ShmBackend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("shm:all_gather");
  CheckSameCount(call, inputs.size(), outputs.size());
  WorkRef work = NewWork(OpType::_ALLGATHER_BASE, call);
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(call, outputs[i], inputs[i]);
    const Buffer whole = work->tensors().Out(outputs[i]);
    Request request;
    request.kind = Kind::kAllGather;
    request.reduction.dtype = DTypeToCompare(inputs[i]);
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
  const CallName call = NameCall("shm:gather");
  const at::Tensor& input = CheckSingleTensor(call, inputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "outputs", outputs, options.rootRank);
  const bool root = options.rootRank == rank_;
  WorkRef work = NewWork(OpType::GATHER, call);
  Request request;
  request.kind = Kind::kGather;
  request.reduction.dtype = DTypeToCompare(input);
  request.root = static_cast<int>(options.rootRank);
  request.send.resize(size_);
  request.recv.resize(size_);
  request.send[request.root] = work->tensors().In(input);
  for (int rank = 0; root && rank < size_; ++rank) {
    CheckTensor(call, outputs[0][rank]);
    request.recv[rank] = work->tensors().Out(outputs[0][rank]);
  }
  if (root) CheckOwnPart(call, input.nbytes(), request.recv[rank_].bytes);
  work->requests.push_back(std::move(request));
  return Start(std::move(work), root ? outputs[0] : Tensors(), options.timeout);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const CallName call = NameCall("shm:scatter");
  const at::Tensor& output = CheckSingleTensor(call, outputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "inputs", inputs, options.rootRank);
  const bool root = options.rootRank == rank_;
  WorkRef work = NewWork(OpType::SCATTER, call);
  Request request;
  request.kind = Kind::kScatter;
  request.reduction.dtype = DTypeToCompare(output);
  request.root = static_cast<int>(options.rootRank);
  request.send.resize(size_);
  request.recv.resize(size_);
  request.recv[request.root] = work->tensors().Out(output);
  for (int rank = 0; root && rank < size_; ++rank) {
    CheckTensor(call, inputs[0][rank]);
    request.send[rank] = work->tensors().In(inputs[0][rank]);
  }
  if (root) CheckOwnPart(call, request.send[rank_].bytes, output.nbytes());
  work->requests.push_back(std::move(request));
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("shm:reduce_scatter");
  const at::Tensor& output = CheckSingleTensor(call, outputs);
  CheckSingleList(call, "inputs", inputs);
  const c10d::ReduceOp& op = options.reduceOp;
  const Reduction reduction = CheckReduction(call, op, output.scalar_type());
  WorkRef work = NewWork(OpType::REDUCE_SCATTER, call);
  // The output may be this rank's slice of the input, as for the shards of a flat gradient. The
  // other slices are only read.
  Request request = ReduceRequest(Kind::kReduceScatter, reduction, work->tensors().Out(output, op));
  for (const at::Tensor& input : inputs[0]) {
    CheckSameSize(call, input, output);
    request.send.push_back(work->tensors().In(input, op));
  }
  work->requests.push_back(std::move(request));
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return reduce_scatter_single_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("shm:reduce_scatter");
  CheckSameCount(call, inputs.size(), outputs.size());
  WorkRef work = NewWork(OpType::_REDUCE_SCATTER_BASE, call);
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(call, inputs[i], outputs[i]);
    const Reduction reduction = CheckReduction(call, options.reduceOp, outputs[i].scalar_type());
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
  const CallName call = NameCall("shm:all_to_all");
  CheckOnePerRank(call, "inputs", inputs.size());
  CheckOnePerRank(call, "outputs", outputs.size());
  CheckTensors(call, inputs);
  CheckTensors(call, outputs);
  CheckOwnPart(call, inputs[rank_].nbytes(), outputs[rank_].nbytes());
  WorkRef work = NewWork(OpType::ALLTOALL, call);
  Request request;
  request.kind = Kind::kAllToAll;
  request.reduction.dtype = DTypeToCompare(inputs[rank_]);
  for (int rank = 0; rank < size_; ++rank) {
    request.send.push_back(work->tensors().In(inputs[rank]));
    request.recv.push_back(work->tensors().Out(outputs[rank]));
  }
  work->requests.push_back(std::move(request));
  return Start(std::move(work), outputs, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  const CallName call = NameCall("shm:all_to_all");
  CheckSameDtype(call, input, output);
  // Splits are along the first dimension; none given: equal parts.
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  WorkRef work = NewWork(OpType::ALLTOALL_BASE, call);
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
  request.reduction.dtype = DTypeToCompare(input);
  request.send = parts(work->tensors().In(input), input, input_splits);
  request.recv = parts(work->tensors().Out(output), output, output_splits);
  CheckOwnPart(call, request.send[rank_].bytes, request.recv[rank_].bytes);
  work->requests.push_back(std::move(request));
  return Start(std::move(work), {output}, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::Message(Kind kind, Tensors& tensors, int peer, int tag) {
  const bool send = kind == Kind::kSend;
  const bool any_source = !send && peer == kAnySource;
  const CallName call = NameCall(send ? "shm:send" : "shm:recv");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  if (!any_source) {
    CheckRank(call, "peer", peer);
    TORCH_CHECK(peer != rank_, call, ": this rank given as the peer; another rank is required");
  }
  TORCH_CHECK(tag >= 0, call, ": tag ", tag, " given; tags from 0 are required");
  WorkRef work = NewWork(send         ? OpType::SEND
                         : any_source ? OpType::RECVANYSOURCE
                                      : OpType::RECV,
                         call);
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
  WorkRef work = NewWork(OpType::BARRIER, NameCall("shm:barrier"));
  work->requests.push_back(Request());
  return Start(std::move(work), {}, options.timeout);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  // A barrier that fails names all missing ranks, whatever `wait_all_ranks` is.
  barrier(options)->wait(kNoTimeout);
}

}  // namespace ddp::backends::shm
