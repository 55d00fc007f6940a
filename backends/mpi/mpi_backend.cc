#include "backends/mpi/mpi_backend.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "backends/common/join.h"
#include "backends/common/sparse.h"
#include "backends/common/tensor_checks.h"
#include "backends/mpi/runtime.h"
#include "backends/mpi/work.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::mpi {
namespace {

using c10d::OpType;

std::string WorldRankKey(int rank) { return absl::StrCat("mpi_world_rank/", rank); }

// The rank in MPI_COMM_WORLD of each rank of the group.
absl::StatusOr<std::vector<int>> ExchangeWorldRanks(c10d::Store& store, int rank, int size,
                                                    int world_rank, absl::Duration timeout) {
  DDP_RETURN_IF_ERROR(CatchStatus("telling the other ranks this one's place in MPI", [&] {
    const std::string mine = absl::StrCat(world_rank);
    store.set(WorldRankKey(rank), std::vector<uint8_t>(mine.begin(), mine.end()));
  }));
  DDP_RETURN_IF_ERROR(WaitForAllRanks(store, rank, size, timeout));
  std::vector<int> world_ranks(size);
  DDP_RETURN_IF_ERROR(CatchStatus("reading the other ranks' places in MPI", [&]() -> absl::Status {
    for (int peer = 0; peer < size; ++peer) {
      const std::vector<uint8_t> value = store.get(WorldRankKey(peer));
      if (!absl::SimpleAtoi(std::string(value.begin(), value.end()), &world_ranks[peer])) {
        return absl::InternalError(
            absl::StrCat("the store's ", WorldRankKey(peer), " is not a number"));
      }
    }
    return absl::OkStatus();
  }));
  return world_ranks;
}

// Collective over ranks 0 … size-1, which may be any processes of the job. `store` must be used by
// this call only (PrefixStore). DeadlineExceeded names the ranks that have not joined within
// `timeout`. FailedPrecondition if two ranks are the same process for MPI.
absl::StatusOr<std::shared_ptr<MpiGroup>> CreateGroup(Runtime& runtime,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size, absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(std::vector<int> world_ranks,
                       ExchangeWorldRanks(*store, rank, size, runtime.world_rank(), timeout));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || world_ranks[peer] != world_ranks[rank]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks ", rank, " and ", peer, " are both rank ", world_ranks[peer], " of ",
                     runtime.world_size(),
                     " to MPI: each rank must be a process of its own, started by the "
                     "mpirun of the MPI that this program was built with, which is ",
                     LibraryVersion()));
  }
  return MpiGroup::Create(runtime, std::move(world_ranks));
}

// Divides `block`, the memory of `tensor`, into one part per rank: splits[r] rows, or equal parts
// if `splits` is empty.
std::vector<Buffer> SplitRows(const CallName& call, Buffer block, const at::Tensor& tensor,
                              const std::vector<int64_t>& splits) {
  const int size = call.world_size;
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  int64_t total = 0;
  for (int64_t split : splits) total += split;
  TORCH_CHECK(!splits.empty() || rows % size == 0, call, ": ", rows,
              " rows given; a multiple of the number of ranks is required");
  TORCH_CHECK(splits.empty() || (splits.size() == static_cast<size_t>(size) && total == rows), call,
              ": split sizes ", at::IntArrayRef(splits), " given for ", rows,
              " rows; one size per rank, with that sum, is required");
  const size_t row_bytes = rows > 0 ? block.bytes / rows : 0;
  std::vector<Buffer> parts;
  for (int rank = 0; rank < size; ++rank) {
    const size_t bytes = row_bytes * (splits.empty() ? rows / size : splits[rank]);
    parts.push_back({block.data, bytes});
    block.data += bytes;
  }
  return parts;
}

// " of 1000 x Float and 2 more tensors"; empty for none.
std::string DescribeTensors(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return "";
  std::string text =
      absl::StrCat(" of ", tensors[0].numel(), " x ", c10::toString(tensors[0].scalar_type()));
  if (tensors.size() > 1) absl::StrAppend(&text, " and ", tensors.size() - 1, " more tensors");
  return text;
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateMpi(const BackendOptions& options) {
  DDP_ASSIGN_OR_RETURN(Runtime * runtime, Runtime::Start(options.group.join_timeout));
  runtime->WaitAtExit(options.group.timeout);
  DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group,
                       CreateGroup(*runtime, options.store, options.rank.rank,
                                   options.rank.world_size, options.group.join_timeout));
  return c10::make_intrusive<MpiBackend>(std::move(group), options.group.timeout,
                                         options.group.join_timeout);
}

MpiBackend::MpiBackend(std::shared_ptr<MpiGroup> group, absl::Duration timeout,
                       absl::Duration join_timeout)
    : Backend(group->rank(), group->size()),
      group_(std::move(group)),
      timeout_(absl::ToChronoMilliseconds(timeout)),
      join_timeout_(join_timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("mpi", timeout_.load());
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  for (int rank : ranks) CheckRank(NameCall("mpi:split"), "member", rank);
  const auto self = std::find(ranks.begin(), ranks.end(), getRank());
  if (self == ranks.end()) return nullptr;
  const auto timeout = options != nullptr ? options->timeout : timeout_.load();
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  absl::StatusOr<std::shared_ptr<MpiGroup>> group =
      CreateGroup(group_->runtime(), prefixed, static_cast<int>(self - ranks.begin()),
                  static_cast<int>(ranks.size()), join_timeout_);
  if (!group.ok()) C10_THROW_ERROR(DistBackendError, std::string(group.status().message()));
  return c10::make_intrusive<MpiBackend>(*std::move(group), absl::FromChrono(timeout),
                                         join_timeout_);
}

c10d::ErrorType MpiBackend::getError() {
  const absl::StatusCode code = group_->failure_code();
  if (code == absl::StatusCode::kOk) return c10d::ErrorType::SUCCESS;
  return code == absl::StatusCode::kDeadlineExceeded ? c10d::ErrorType::TIMEOUT
                                                     : c10d::ErrorType::COMM_ERROR;
}

void MpiBackend::abort() {
  group_->Abort(absl::CancelledError(
      absl::StrCat("rank ", getRank(), " has aborted the group: Backend::abort()")));
}

MpiBackend::WorkPtr MpiBackend::Submit(Call call, std::shared_ptr<Staging> staging,
                                       std::function<Coroutine(Channel&)> body) {
  const uint64_t number = call.is_collective ? ++sequence_number_ : 0;
  const auto timeout = call.timeout == c10d::kUnsetTimeout ? timeout_.load() : call.timeout;
  Operation operation;
  operation.is_collective = call.is_collective;
  operation.signature = std::hash<std::string>()(call.title);
  operation.timeout = absl::FromChrono(timeout);
  operation.on_timeout = std::move(call.on_timeout);
  operation.describe = [title = call.title, number, inputs = call.inputs] {
    return absl::StrCat(title, number > 0 ? absl::StrCat(" #", number) : "",
                        DescribeTensors(inputs));
  };
  auto work = c10::make_intrusive<MpiWork>(getRank(), call.type, call.title, number, call.inputs,
                                           std::move(call.outputs));
  operation.done = [work, staging](const absl::Status& status, int source) {
    if (status.ok()) staging->CopyBack();
    work->Done(status, source);
  };
  operation.body = [staging = std::move(staging), body = std::move(body)](Channel& channel) {
    return body(channel);
  };
  group_->Submit(std::move(operation));
  return work;
}

MpiBackend::WorkPtr MpiBackend::AllReduceEach(Call call, c10d::ReduceOp op) {
  struct Part {
    Reduction reduction;
    std::byte* data;
    size_t count;
  };
  const CallName name = NameCall(call.title);
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts;
  for (const at::Tensor& tensor : call.inputs) {
    CheckTensor(name, tensor);
    parts.push_back({CheckReduction(name, op, tensor.scalar_type()),
                     staging->InOut(tensor, op).data, static_cast<size_t>(tensor.numel())});
  }
  call.outputs = {call.inputs};
  if (parts.size() == 1) {
    return Submit(std::move(call), staging, [part = parts[0]](Channel& channel) {
      return AllReduce(channel, part.reduction, part.data, part.count);
    });
  }
  return Submit(std::move(call), staging, [parts](Channel& channel) {
    return InTurn(channel, parts.size(), [parts, &channel](size_t i) {
      return AllReduce(channel, parts[i].reduction, parts[i].data, parts[i].count);
    });
  });
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (IsSparse(tensors)) return SparseAllReduce(*this, tensors, options);
  const CallName call = NameCall("mpi:all_reduce");
  CheckSingleTensor(call, tensors);
  return AllReduceEach({.type = OpType::ALLREDUCE,
                        .title = call.operation,
                        .timeout = options.timeout,
                        .inputs = tensors},
                       options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return AllReduceEach({.type = OpType::ALLREDUCE_COALESCED,
                        .title = "mpi:all_reduce_coalesced",
                        .timeout = options.timeout,
                        .inputs = tensors},
                       options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const CallName call = NameCall("mpi:reduce");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  const Reduction reduction = CheckReduction(call, options.reduceOp, tensor.scalar_type());
  auto staging = std::make_shared<Staging>();
  const int root = static_cast<int>(options.rootRank);
  // On other ranks the tensor is not changed.
  const Buffer buffer = root == getRank() ? staging->InOut(tensor, options.reduceOp)
                                          : staging->In(tensor, options.reduceOp);
  const auto count = static_cast<size_t>(tensor.numel());
  return Submit({.type = OpType::REDUCE,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = tensors,
                 .outputs = {tensors}},
                staging, [=](Channel& channel) {
                  return Reduce(channel, reduction, buffer.data, count, root);
                });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("mpi:reduce_scatter");
  const at::Tensor& output = CheckSingleTensor(call, outputs);
  CheckSingleList(call, "inputs", inputs);
  CheckSameSize(call, inputs[0][getRank()], output);
  const Reduction reduction = CheckReduction(call, options.reduceOp, output.scalar_type());
  auto staging = std::make_shared<Staging>();
  std::vector<std::byte*> data;
  std::vector<size_t> counts;
  for (const at::Tensor& input : inputs[0]) {
    CheckSameDtype(call, input, output);
    data.push_back(staging->In(input, options.reduceOp).data);
    counts.push_back(input.numel());
  }
  const Buffer result = staging->Out(output, options.reduceOp);
  return Submit({.type = OpType::REDUCE_SCATTER,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = inputs[0],
                 .outputs = {outputs}},
                staging, [=](Channel& channel) {
                  return ReduceScatter(channel, reduction, data, counts, result.data);
                });
}

MpiBackend::WorkPtr MpiBackend::ReduceScatterEach(Call call, Tensors& outputs, Tensors& inputs,
                                                  c10d::ReduceOp op) {
  struct Part {
    Reduction reduction;
    std::vector<std::byte*> inputs;
    std::vector<size_t> counts;
    std::byte* output;
  };
  const CallName name = NameCall(call.title);
  CheckSameCount(name, inputs.size(), outputs.size());
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(name, inputs[i], outputs[i]);
    Part part{CheckReduction(name, op, inputs[i].scalar_type()), {}, {}, nullptr};
    const Buffer input = staging->In(inputs[i], op);
    const Buffer output = staging->Out(outputs[i], op);
    for (int rank = 0; rank < getSize(); ++rank) {
      part.inputs.push_back(input.data + rank * output.bytes);
    }
    part.counts.assign(getSize(), outputs[i].numel());
    part.output = output.data;
    parts.push_back(std::move(part));
  }
  call.inputs = inputs;
  call.outputs = {outputs};
  return Submit(std::move(call), staging, [parts](Channel& channel) {
    return InTurn(channel, parts.size(), [parts, &channel](size_t i) {
      return ReduceScatter(channel, parts[i].reduction, parts[i].inputs, parts[i].counts,
                           parts[i].output);
    });
  });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return ReduceScatterEach({.type = OpType::_REDUCE_SCATTER_BASE,
                            .title = "mpi:reduce_scatter_single",
                            .timeout = options.timeout},
                           outputs, inputs, options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return ReduceScatterEach({.type = OpType::COALESCED,
                            .title = "mpi:reduce_scatter_single_coalesced",
                            .timeout = options.timeout},
                           outputs, inputs, options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return Submit({.type = OpType::BARRIER, .title = "mpi:barrier", .timeout = options.timeout},
                std::make_shared<Staging>(), [](Channel& channel) { return Barrier(channel); });
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  auto reply = std::make_shared<BarrierReply>();
  auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_.load() : options.timeout;
  Call call{.type = OpType::BARRIER, .title = "mpi:monitored_barrier", .timeout = timeout};
  if (getRank() == 0) {
    call.on_timeout = [reply, group = group_.get()](Channel& channel) {
      return ReportMissingRanks(channel, *reply, [&](int rank) { return group->NameOf(rank); });
    };
  } else {
    // The answer of rank 0 contains more than this rank's own timeout error.
    call.timeout += std::chrono::seconds(1);
  }
  Submit(std::move(call), std::make_shared<Staging>(), [reply](Channel& channel) {
    return MonitoredBarrier(channel, *reply);
  })->wait();
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const CallName call = NameCall("mpi:broadcast");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = root == getRank() ? staging->In(tensor) : staging->Out(tensor);
  return Submit({.type = OpType::BROADCAST,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = tensors,
                 .outputs = {tensors}},
                staging, [=](Channel& channel) { return Broadcast(channel, buffer, root); });
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("mpi:all_gather");
  const at::Tensor& input = CheckSingleTensor(call, inputs);
  CheckSingleList(call, "outputs", outputs);
  CheckSameSize(call, input, outputs[0][getRank()]);
  auto staging = std::make_shared<Staging>();
  const Buffer mine = staging->In(input);
  std::vector<Buffer> all;
  for (const at::Tensor& output : outputs[0]) {
    CheckSameDtype(call, input, output);
    all.push_back(staging->Out(output));
  }
  return Submit({.type = OpType::ALLGATHER,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = outputs},
                staging, [=](Channel& channel) { return AllGatherApart(channel, mine, all); });
}

MpiBackend::WorkPtr MpiBackend::AllGatherEach(Call call, Tensors& outputs, Tensors& inputs) {
  struct Part {
    Buffer mine;
    Buffer all;
  };
  const CallName name = NameCall(call.title);
  CheckSameCount(name, inputs.size(), outputs.size());
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(name, outputs[i], inputs[i]);
    parts.push_back({staging->In(inputs[i]), staging->Out(outputs[i])});
  }
  call.inputs = inputs;
  call.outputs = {outputs};
  return Submit(std::move(call), staging, [parts](Channel& channel) {
    return InTurn(channel, parts.size(), [parts, &channel](size_t i) {
      return AllGather(channel, parts[i].mine, parts[i].all.data);
    });
  });
}

MpiBackend::WorkPtr MpiBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return AllGatherEach({.type = OpType::_ALLGATHER_BASE,
                        .title = "mpi:_all_gather_base",
                        .timeout = options.timeout},
                       outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  return AllGatherEach({.type = OpType::COALESCED,
                        .title = "mpi:all_gather_into_tensor_coalesced",
                        .timeout = options.timeout},
                       outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("mpi:all_gather_coalesced");
  struct Part {
    Buffer mine;
    std::vector<Buffer> all;
  };
  CheckOnePerRank(call, "lists of outputs", outputs.size());
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(call, inputs[i]);
    parts[i].mine = staging->In(inputs[i]);
    for (const Tensors& list : outputs) {
      CheckSameCount(call, inputs.size(), list.size());
      CheckSameSize(call, inputs[i], list[i]);
      parts[i].all.push_back(staging->Out(list[i]));
    }
  }
  return Submit({.type = OpType::ALLGATHER_COALESCED,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = outputs},
                staging, [parts](Channel& channel) {
                  return InTurn(channel, parts.size(), [parts, &channel](size_t i) {
                    return AllGatherApart(channel, parts[i].mine, parts[i].all);
                  });
                });
}

MpiBackend::WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const CallName call = NameCall("mpi:gather");
  const at::Tensor& input = CheckSingleTensor(call, inputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "outputs", outputs, options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send(getSize()), receive(getSize());
  send[root] = staging->In(input);
  if (root == getRank()) {
    for (int rank = 0; rank < getSize(); ++rank) {
      CheckSameSize(call, input, outputs[0][rank]);
      receive[rank] = staging->Out(outputs[0][rank]);
    }
  }
  return Submit({.type = OpType::GATHER,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = outputs},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const CallName call = NameCall("mpi:scatter");
  const at::Tensor& output = CheckSingleTensor(call, outputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "inputs", inputs, options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send(getSize()), receive(getSize());
  receive[root] = staging->Out(output);
  if (root == getRank()) {
    for (int rank = 0; rank < getSize(); ++rank) {
      CheckSameSize(call, inputs[0][rank], output);
      send[rank] = staging->In(inputs[0][rank]);
    }
  }
  return Submit({.type = OpType::SCATTER,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = outputs,
                 .outputs = {outputs}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  const CallName call = NameCall("mpi:all_to_all");
  CheckOnePerRank(call, "inputs", inputs.size());
  CheckOnePerRank(call, "outputs", outputs.size());
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send, receive;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    CheckSameDtype(call, inputs[rank], outputs[rank]);
    send.push_back(staging->In(inputs[rank]));
    receive.push_back(staging->Out(outputs[rank]));
  }
  CheckOwnPart(call, send[getRank()].bytes, receive[getRank()].bytes);
  return Submit({.type = OpType::ALLTOALL,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = {outputs}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  const CallName call = NameCall("mpi:all_to_all_base");
  CheckSameDtype(call, input, output);
  auto staging = std::make_shared<Staging>();
  const std::vector<Buffer> send = SplitRows(call, staging->In(input), input, input_splits);
  const std::vector<Buffer> receive = SplitRows(call, staging->Out(output), output, output_splits);
  CheckOwnPart(call, send[getRank()].bytes, receive[getRank()].bytes);
  return Submit({.type = OpType::ALLTOALL_BASE,
                 .title = call.operation,
                 .timeout = options.timeout,
                 .inputs = {input},
                 .outputs = {{output}}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  const CallName call = NameCall("mpi:send");
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckRank(call, "peer", to);
  CheckTag(call, tag);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = staging->In(tensor);
  return Submit(
      {.type = OpType::SEND, .title = call.operation, .inputs = tensors, .is_collective = false},
      staging, [=](Channel& channel) { return Send(channel, buffer, to, tag); });
}

void MpiBackend::CheckTag(const CallName& call, int tag) const {
  TORCH_CHECK(tag >= 0 && tag <= group_->max_tag(), call, ": tag ", tag, " given; a tag from 0 to ",
              group_->max_tag(), ", the largest of this MPI, is required");
}

MpiBackend::WorkPtr MpiBackend::ReceiveFrom(const CallName& call, Tensors& tensors,
                                            c10d::OpType type, int from, int tag) {
  const at::Tensor& tensor = CheckSingleTensor(call, tensors);
  CheckTag(call, tag);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = staging->Out(tensor);
  return Submit({.type = type,
                 .title = call.operation,
                 .inputs = tensors,
                 .outputs = {tensors},
                 .is_collective = false},
                staging, [=](Channel& channel) { return Receive(channel, buffer, from, tag); });
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  const CallName call = NameCall("mpi:recv");
  CheckRank(call, "peer", from);
  return ReceiveFrom(call, tensors, OpType::RECV, from, tag);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return ReceiveFrom(NameCall("mpi:recv_anysource"), tensors, OpType::RECVANYSOURCE, kAnySource,
                     tag);
}

}  // namespace ddp::backends::mpi
