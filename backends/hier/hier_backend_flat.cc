// HierBackend: collectives that use the flat group of all ranks, and functions that are not
// collectives.
#include <algorithm>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "backends/hier/hier_backend.h"
#include "backends/hier/tensors.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::hier {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

c10::intrusive_ptr<Work> HierBackend::gather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  const CallName call = NameCall("hier:gather");
  CheckSingleTensor(call, inputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "outputs", outputs, options.rootRank);
  for (const Tensors& list : outputs) CheckTensors(call, list);
  return SubmitFlat(OpType::GATHER, call.operation, options.timeout,
                    outputs.empty() ? Tensors() : outputs[0],
                    [this, outputs, inputs, options]() mutable {
                      return parts_.flat.backend->gather(outputs, inputs, options);
                    });
}

c10::intrusive_ptr<Work> HierBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ScatterOptions& options) {
  const CallName call = NameCall("hier:scatter");
  CheckSingleTensor(call, outputs);
  CheckRank(call, "root", options.rootRank);
  CheckListOfRoot(call, "inputs", inputs, options.rootRank);
  for (const Tensors& list : inputs) CheckTensors(call, list);
  return SubmitFlat(OpType::SCATTER, call.operation, options.timeout, outputs,
                    [this, outputs, inputs, options]() mutable {
                      return parts_.flat.backend->scatter(outputs, inputs, options);
                    });
}

c10::intrusive_ptr<Work> HierBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                        std::vector<int64_t>& output_sizes,
                                                        std::vector<int64_t>& input_sizes,
                                                        const c10d::AllToAllOptions& options) {
  const CallName call = NameCall("hier:all_to_all_single");
  CheckTensor(call, input);
  CheckTensor(call, output);
  c10d::checkSplitSizes(output_sizes, output, getSize());
  c10d::checkSplitSizes(input_sizes, input, getSize());
  return Submit(
      OpType::ALLTOALL_BASE, call.operation, options.timeout, {output},
      [this, output, input, output_sizes, input_sizes, options](absl::Time deadline) mutable {
        // Splits count rows, so shapes must be kept.
        at::Tensor sent = input.contiguous();
        at::Tensor received = output.contiguous();
        c10::intrusive_ptr<Work> work;
        InPart(parts_.flat, "starting", [&] {
          work = parts_.flat.backend->all_to_all_single(received, sent, output_sizes, input_sizes,
                                                        options);
        });
        Await(parts_.flat, "waiting", *work, deadline);
        if (!received.is_same(output)) output.copy_(received);
      });
}

// As all_to_all_single of the concatenated tensors, because c10d's gloo has no alltoall.
c10::intrusive_ptr<Work> HierBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& options) {
  const CallName call = NameCall("hier:alltoall");
  CheckOnePerRank(call, "inputs", inputs.size());
  CheckOnePerRank(call, "outputs", outputs.size());
  CheckTensors(call, inputs);
  CheckTensors(call, outputs);
  return Submit(OpType::ALLTOALL, call.operation, options.timeout, outputs,
                [this, outputs, inputs, options](absl::Time deadline) {
                  Tensors flat;
                  std::vector<int64_t> sent, received;
                  for (const at::Tensor& input : inputs) {
                    flat.push_back(input.contiguous().view(-1));
                    sent.push_back(input.numel());
                  }
                  int64_t total = 0;
                  for (const at::Tensor& output : outputs) {
                    received.push_back(output.numel());
                    total += output.numel();
                  }
                  at::Tensor all_sent = at::cat(flat);
                  at::Tensor all_received = at::empty({total}, outputs[0].options());
                  c10::intrusive_ptr<Work> work;
                  InPart(parts_.flat, "starting", [&] {
                    work = parts_.flat.backend->all_to_all_single(all_received, all_sent, received,
                                                                  sent, options);
                  });
                  Await(parts_.flat, "waiting", *work, deadline);
                  int64_t begin = 0;
                  for (const at::Tensor& output : outputs) {
                    output.copy_(all_received.narrow(0, begin, output.numel()).view_as(output));
                    begin += output.numel();
                  }
                });
}

c10::intrusive_ptr<Work> HierBackend::send(Tensors& tensors, int dst, int tag) {
  ThrowIfBroken();
  return parts_.flat.backend->send(tensors, dst, tag);
}

c10::intrusive_ptr<Work> HierBackend::recv(Tensors& tensors, int src, int tag) {
  ThrowIfBroken();
  return parts_.flat.backend->recv(tensors, src, tag);
}

c10::intrusive_ptr<Work> HierBackend::recvAnysource(Tensors& tensors, int tag) {
  ThrowIfBroken();
  return parts_.flat.backend->recvAnysource(tensors, tag);
}

void HierBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  queue_.Drain();
  ThrowIfBroken();
  c10d::BarrierOptions with_timeout = options;
  if (options.timeout == c10d::kUnsetTimeout) with_timeout.timeout = options_->timeout;
  parts_.flat.backend->monitoredBarrier(with_timeout, wait_all_ranks);
}

c10::intrusive_ptr<c10d::Backend> HierBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), getRank());
  if (found == ranks.end()) return nullptr;
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  auto group = config_.create(prefixed, static_cast<int>(found - ranks.begin()),
                              static_cast<int>(ranks.size()),
                              options ? options->timeout : options_->timeout);
  TORCH_CHECK(group.ok(), "hier: split on rank ", getRank(), ": ", group.status().ToString());
  return *group;
}

c10d::ErrorType HierBackend::getError() {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_.empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void HierBackend::abort() { Break(absl::StrCat(Where(), ": aborted by the program")); }

void HierBackend::shutdown() {
  queue_.Drain();
  for (Part* part : {&parts_.local, &parts_.cross, &parts_.flat}) {
    if (*part) part->backend->shutdown();
  }
}

bool HierBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return parts_.local && parts_.local.backend->supportsTensorAlloc(device);
}

at::Tensor HierBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK(parts_.local, "hier: ", Where(), " is alone there, and has no memory to share");
  return parts_.local.backend->allocateTensor(size, options);
}

}  // namespace ddp::backends::hier
