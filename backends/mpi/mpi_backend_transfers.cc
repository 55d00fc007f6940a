// MpiBackend: operations that move data without a reduction.
#include <memory>
#include <utility>
#include <vector>

#include "backends/common/tensor_checks.h"
#include "backends/mpi/mpi_backend.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::mpi {
namespace {

using c10d::OpType;

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

}  // namespace

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
