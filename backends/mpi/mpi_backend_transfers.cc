// The operations that move data and combine nothing.
#include <memory>
#include <utility>
#include <vector>

#include "backends/mpi/checks.h"
#include "backends/mpi/mpi_backend.h"
#include "c10/util/Exception.h"

namespace ddp::backends::mpi {
namespace {

using c10d::OpType;

// Rows of a tensor by rank, in one block of memory: `splits` rows each, or equally many.
std::vector<Buffer> SplitRows(const char* title, Buffer block, const at::Tensor& tensor,
                              const std::vector<int64_t>& splits, int size) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  int64_t total = 0;
  for (int64_t split : splits) total += split;
  TORCH_CHECK(splits.empty() ? rows % size == 0
                             : splits.size() == static_cast<size_t>(size) && total == rows,
              title, ": ", rows, " rows cannot be split into ",
              splits.empty() ? at::IntArrayRef(size) : at::IntArrayRef(splits),
              splits.empty() ? " equal parts" : " for as many ranks");
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
  static constexpr char kTitle[] = "mpi:broadcast";
  const at::Tensor& tensor = Single(kTitle, tensors);
  CheckRank(kTitle, options.rootRank, "root rank");
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = root == getRank() ? staging->In(tensor) : staging->Out(tensor);
  return Submit({.type = OpType::BROADCAST,
                 .title = kTitle,
                 .timeout = options.timeout,
                 .inputs = tensors,
                 .outputs = {tensors}},
                staging, [=](Channel& channel) { return Broadcast(channel, buffer, root); });
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  static constexpr char kTitle[] = "mpi:all_gather";
  const at::Tensor& input = Single(kTitle, inputs);
  DDP_MPI_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()), kTitle,
                "takes one list of as many outputs as there are ranks");
  DDP_MPI_CHECK(outputs[0][getRank()].numel() == input.numel(), kTitle, "the input has ",
                input.numel(), " elements, this rank's output ", outputs[0][getRank()].numel());
  auto staging = std::make_shared<Staging>();
  const Buffer mine = staging->In(input);
  std::vector<Buffer> all;
  for (const at::Tensor& output : outputs[0]) {
    CheckSameType(kTitle, input, output);
    all.push_back(staging->Out(output));
  }
  return Submit({.type = OpType::ALLGATHER,
                 .title = kTitle,
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
  DDP_MPI_CHECK(inputs.size() == outputs.size(), call.title, inputs.size(), " inputs, but ",
                outputs.size(), " outputs");
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckSameType(call.title, inputs[i], outputs[i]);
    DDP_MPI_CHECK(outputs[i].numel() == inputs[i].numel() * getSize(), call.title, "an output of ",
                  outputs[i].numel(), " elements for an input of ", inputs[i].numel());
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

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return AllGatherEach({.type = OpType::_ALLGATHER_BASE,
                        .title = "mpi:_all_gather_base",
                        .timeout = options.timeout},
                       outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return AllGatherEach({.type = OpType::COALESCED,
                        .title = "mpi:all_gather_into_tensor_coalesced",
                        .timeout = options.timeout},
                       outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  static constexpr char kTitle[] = "mpi:all_gather_coalesced";
  struct Part {
    Buffer mine;
    std::vector<Buffer> all;
  };
  DDP_MPI_CHECK(outputs.size() == static_cast<size_t>(getSize()), kTitle, outputs.size(),
                " lists of outputs; one for each rank is needed");
  auto staging = std::make_shared<Staging>();
  std::vector<Part> parts(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(kTitle, inputs[i]);
    parts[i].mine = staging->In(inputs[i]);
    for (const Tensors& list : outputs) {
      DDP_MPI_CHECK(list.size() == inputs.size() && list[i].numel() == inputs[i].numel(), kTitle,
                    "each list must have an output like every input");
      CheckSameType(kTitle, inputs[i], list[i]);
      parts[i].all.push_back(staging->Out(list[i]));
    }
  }
  return Submit({.type = OpType::ALLGATHER_COALESCED,
                 .title = kTitle,
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
  static constexpr char kTitle[] = "mpi:gather";
  const at::Tensor& input = Single(kTitle, inputs);
  CheckRank(kTitle, options.rootRank, "root rank");
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send(getSize()), receive(getSize());
  send[root] = staging->In(input);
  if (root == getRank()) {
    DDP_MPI_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()),
                  kTitle, "the root takes one list of as many outputs as there are ranks");
    for (int rank = 0; rank < getSize(); ++rank) {
      CheckSameType(kTitle, input, outputs[0][rank]);
      DDP_MPI_CHECK(outputs[0][rank].numel() == input.numel(), kTitle, "an output of ",
                    outputs[0][rank].numel(), " elements for inputs of ", input.numel());
      receive[rank] = staging->Out(outputs[0][rank]);
    }
  } else {
    DDP_MPI_CHECK(outputs.empty(), kTitle, "only the root, rank ", root, ", has outputs");
  }
  return Submit({.type = OpType::GATHER,
                 .title = kTitle,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = outputs},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  static constexpr char kTitle[] = "mpi:scatter";
  const at::Tensor& output = Single(kTitle, outputs);
  CheckRank(kTitle, options.rootRank, "root rank");
  const int root = static_cast<int>(options.rootRank);
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send(getSize()), receive(getSize());
  receive[root] = staging->Out(output);
  if (root == getRank()) {
    DDP_MPI_CHECK(inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(getSize()), kTitle,
                  "the root takes one list of as many inputs as there are ranks");
    for (int rank = 0; rank < getSize(); ++rank) {
      CheckSameType(kTitle, inputs[0][rank], output);
      DDP_MPI_CHECK(inputs[0][rank].numel() == output.numel(), kTitle, "an input of ",
                    inputs[0][rank].numel(), " elements for outputs of ", output.numel());
      send[rank] = staging->In(inputs[0][rank]);
    }
  } else {
    DDP_MPI_CHECK(inputs.empty(), kTitle, "only the root, rank ", root, ", has inputs");
  }
  return Submit({.type = OpType::SCATTER,
                 .title = kTitle,
                 .timeout = options.timeout,
                 .inputs = outputs,
                 .outputs = {outputs}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  static constexpr char kTitle[] = "mpi:all_to_all";
  const auto size = static_cast<size_t>(getSize());
  DDP_MPI_CHECK(inputs.size() == size && outputs.size() == size, kTitle,
                "takes an input and an output for each rank");
  auto staging = std::make_shared<Staging>();
  std::vector<Buffer> send, receive;
  for (size_t rank = 0; rank < size; ++rank) {
    CheckSameType(kTitle, inputs[rank], outputs[rank]);
    send.push_back(staging->In(inputs[rank]));
    receive.push_back(staging->Out(outputs[rank]));
  }
  DDP_MPI_CHECK(send[getRank()].bytes == receive[getRank()].bytes, kTitle,
                "what this rank sends itself differs in size from what it receives");
  return Submit({.type = OpType::ALLTOALL,
                 .title = kTitle,
                 .timeout = options.timeout,
                 .inputs = inputs,
                 .outputs = {outputs}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  static constexpr char kTitle[] = "mpi:all_to_all_base";
  CheckSameType(kTitle, input, output);
  auto staging = std::make_shared<Staging>();
  const std::vector<Buffer> send =
      SplitRows(kTitle, staging->In(input), input, input_splits, getSize());
  const std::vector<Buffer> receive =
      SplitRows(kTitle, staging->Out(output), output, output_splits, getSize());
  DDP_MPI_CHECK(send[getRank()].bytes == receive[getRank()].bytes, kTitle,
                "what this rank sends itself differs in size from what it receives");
  return Submit({.type = OpType::ALLTOALL_BASE,
                 .title = kTitle,
                 .timeout = options.timeout,
                 .inputs = {input},
                 .outputs = {{output}}},
                staging, [=](Channel& channel) { return Exchange(channel, send, receive); });
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  static constexpr char kTitle[] = "mpi:send";
  const at::Tensor& tensor = Single(kTitle, tensors);
  CheckRank(kTitle, to, "rank to send to");
  CheckTag(kTitle, tag);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = staging->In(tensor);
  return Submit({.type = OpType::SEND, .title = kTitle, .inputs = tensors, .is_collective = false},
                staging, [=](Channel& channel) { return Send(channel, buffer, to, tag); });
}

MpiBackend::WorkPtr MpiBackend::ReceiveFrom(const char* title, Tensors& tensors, c10d::OpType type,
                                            int from, int tag) {
  const at::Tensor& tensor = Single(title, tensors);
  CheckTag(title, tag);
  auto staging = std::make_shared<Staging>();
  const Buffer buffer = staging->Out(tensor);
  return Submit({.type = type,
                 .title = title,
                 .inputs = tensors,
                 .outputs = {tensors},
                 .is_collective = false},
                staging, [=](Channel& channel) { return Receive(channel, buffer, from, tag); });
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  static constexpr char kTitle[] = "mpi:recv";
  CheckRank(kTitle, from, "rank to receive from");
  return ReceiveFrom(kTitle, tensors, OpType::RECV, from, tag);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return ReceiveFrom("mpi:recv_anysource", tensors, OpType::RECVANYSOURCE, kAnySource, tag);
}

}  // namespace ddp::backends::mpi
