#include "backends/hier/hier_backend.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "backends/common/sparse.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::hier {
namespace {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

// `whole`, which is 1-d, cut into `count` views of the same size, which divides its own.
Tensors EqualParts(const at::Tensor& whole, int count) {
  const int64_t size = whole.numel() / count;
  Tensors parts;
  for (int i = 0; i < count; ++i) parts.push_back(whole.narrow(0, i * size, size));
  return parts;
}

}  // namespace

Flat Flat::Of(const at::Tensor& tensor) { return Flat(tensor, tensor.contiguous().view(-1)); }

Flat Flat::ToFill(const at::Tensor& tensor) {
  return Flat(tensor, tensor.is_contiguous() ? tensor.view(-1)
                                             : at::empty({tensor.numel()}, tensor.options()));
}

void Flat::CopyBack() {
  if (!original_.is_contiguous()) original_.copy_(flat_.view(original_.sizes()));
}

HierBackend::HierBackend(Config config)
    : Backend(config.topology.rank(), config.parts.flat.backend->getSize()),
      config_(std::move(config)),
      topology_(config_.topology),
      parts_(config_.parts),
      options_(c10::make_intrusive<Options>("hier", config_.timeout)),
      link_(config_.options.packing),
      queue_(getRank()) {}

HierBackend::~HierBackend() {
  // The queue is destroyed first and waits for pending collectives, so make them fail.
  if (!queue_.idle()) Break(absl::StrCat(Where(), ": the group was destroyed"));
}

std::string HierBackend::Where() const {
  return absl::StrCat("rank ", getRank(), " on host ", topology_.host, " (",
                      config_.host_names[topology_.host], ")");
}

void HierBackend::ThrowIfBroken() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) C10_THROW_ERROR(DistBackendError, broken_);
}

void HierBackend::Break(const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) return;
    broken_ = message;
  }
  parts_.Abort();
}

void HierBackend::Fail(const std::string& message) {
  Break(absl::StrCat(Where(), ": ", message));
  std::lock_guard<std::mutex> lock(mutex_);
  // An earlier failure of the group, such as abort() by this program, is the cause of this one.
  C10_THROW_ERROR(DistBackendError, broken_);
}

c10::intrusive_ptr<Work> HierBackend::Submit(OpType op, const char* title,
                                             std::chrono::milliseconds timeout, Tensors outputs,
                                             Body body) {
  ThrowIfBroken();
  const absl::Duration limit =
      absl::FromChrono(timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
  return queue_.Submit(op, std::move(outputs), [this, title, limit, body = std::move(body)] {
    ThrowIfBroken();
    const absl::Time deadline = absl::Now() + limit;
    try {
      body(deadline);
    } catch (const PartError& error) {
      Fail(absl::StrCat(title, " failed ", error.what(),
                        absl::Now() < deadline ? ""
                                               : absl::StrCat(" (Timed out after ",
                                                              absl::FormatDuration(limit), ")")));
    } catch (const std::exception& error) {
      Fail(absl::StrCat(title, " failed: ", ExceptionMessage(error)));
    }
  });
}

c10::intrusive_ptr<Work> HierBackend::SubmitFlat(OpType op, const char* title,
                                                 std::chrono::milliseconds timeout, Tensors outputs,
                                                 std::function<c10::intrusive_ptr<Work>()> start) {
  return Submit(op, title, timeout, std::move(outputs),
                [this, start = std::move(start)](absl::Time deadline) {
                  c10::intrusive_ptr<Work> work;
                  InPart(parts_.flat, "starting", [&] { work = start(); });
                  Await(parts_.flat, "waiting", *work, deadline);
                });
}

void HierBackend::RunPipeline(std::vector<Item> items, const HierReduction* reduction,
                              absl::Time deadline) {
  Pipeline(topology_, parts_, reduction, link_, deadline, config_.options.window)
      .Run(std::move(items));
}

int64_t HierBackend::ChunkBytes() const {
  const int64_t most = config_.options.chunk_bytes;
  return link_.slow() ? std::max<int64_t>(most / 4, 1024) : most;
}

void HierBackend::RunAllreduce(const Tensors& tensors, const HierReduction& reduction,
                               absl::Time deadline) {
  constexpr size_t kEnoughToTell = 1'000'000;
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  const absl::Time began = absl::Now();
  Pipeline pipeline(topology_, parts_, &reduction, link_, deadline, config_.options.window);
  pipeline.Run(AllreduceItems(topology_, tensors, ChunkBytes()));
  if (bytes < kEnoughToTell) return;

  // Only ranks on a lane have sent anything.
  const bool has_sent = static_cast<bool>(parts_.cross);
  link_.Record(
      has_sent ? pipeline.sent_bytes() * topology_.lanes() : std::numeric_limits<int64_t>::max(),
      absl::Now() - began);
  if (!link_.due()) return;
  Tensors slowest = {at::full({1}, link_.bytes_per_s(), at::kDouble)};
  c10d::AllreduceOptions minimum;
  minimum.reduceOp = c10d::ReduceOp::MIN;
  minimum.timeout = Remaining(deadline);
  c10::intrusive_ptr<Work> work;
  InPart(parts_.flat, "starting", [&] { work = parts_.flat.backend->allreduce(slowest, minimum); });
  Await(parts_.flat, "waiting", *work, deadline);
  link_.Agree(slowest[0].item<double>());
}

c10::intrusive_ptr<Work> HierBackend::Allreduce(OpType op, const CallName& call, Tensors tensors,
                                                const c10d::AllreduceOptions& options) {
  CheckTensors(call, tensors);
  const HierReduction reduction(call, options.reduceOp, tensors);
  return Submit(op, call.operation, options.timeout, tensors,
                [this, tensors, reduction](absl::Time deadline) {
                  std::vector<Flat> flat;
                  Tensors views;
                  for (const at::Tensor& tensor : tensors) {
                    flat.push_back(Flat::Of(tensor));
                    views.push_back(reduction.View(flat.back().tensor()));
                  }
                  RunAllreduce(views, reduction, deadline);
                  for (Flat& f : flat) f.CopyBack();
                });
}

c10::intrusive_ptr<Work> HierBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& options) {
  if (IsSparse(tensors)) return SparseAllReduce(*this, tensors, options);
  const CallName call = NameCall("hier:allreduce");
  CheckSingleTensor(call, tensors);
  return Allreduce(OpType::ALLREDUCE, call, tensors, options);
}

c10::intrusive_ptr<Work> HierBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return Allreduce(OpType::ALLREDUCE_COALESCED, NameCall("hier:allreduce_coalesced"), tensors,
                   options);
}

c10::intrusive_ptr<Work> HierBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const CallName call = NameCall("hier:reduce");
  CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  const auto root = static_cast<int>(options.rootRank);
  const HierReduction reduction(call, options.reduceOp, tensors);
  return Submit(
      OpType::REDUCE, call.operation, options.timeout, tensors,
      [this, tensor = tensors[0], root, reduction](absl::Time deadline) {
        Flat flat = Flat::Of(tensor);
        const at::Tensor view = reduction.View(flat.tensor());
        const bool at_root = getRank() == root;
        RunPipeline(ReduceItems(topology_, view, at_root ? view : at::Tensor(), root, ChunkBytes()),
                    &reduction, deadline);
        if (at_root) flat.CopyBack();
      });
}

c10::intrusive_ptr<Work> HierBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& options) {
  const CallName call = NameCall("hier:broadcast");
  CheckSingleTensor(call, tensors);
  CheckRank(call, "root", options.rootRank);
  const auto root = static_cast<int>(options.rootRank);
  return Submit(OpType::BROADCAST, call.operation, options.timeout, tensors,
                [this, tensor = tensors[0], root](absl::Time deadline) {
                  Flat flat = Flat::Of(tensor);
                  RunPipeline(BroadcastItems(topology_, flat.tensor(), root, ChunkBytes()),
                              /*reduction=*/nullptr, deadline);
                  if (getRank() != root) flat.CopyBack();
                });
}

c10::intrusive_ptr<Work> HierBackend::Allgather(OpType op, const CallName& call, Tensors results,
                                                TensorLists outputs, Tensors inputs,
                                                std::chrono::milliseconds timeout,
                                                std::vector<Flat> wholes) {
  for (const Tensors& list : outputs) CheckTensors(call, list);
  CheckTensors(call, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckOnePerRank(call, "outputs", outputs[i].size());
    CheckSameSize(call, inputs[i], outputs[i][getRank()]);
  }
  return Submit(
      op, call.operation, timeout, std::move(results),
      [this, outputs = std::move(outputs), inputs = std::move(inputs),
       wholes = std::move(wholes)](absl::Time deadline) mutable {
        std::vector<Flat> flat;
        std::vector<std::vector<Item>> lists;
        for (size_t i = 0; i < inputs.size(); ++i) {
          for (int rank = 0; rank < getSize(); ++rank) {
            const bool own = rank == getRank();
            if (own) outputs[i][rank].copy_(inputs[i].reshape_as(outputs[i][rank]));
            flat.push_back(own ? Flat::Of(outputs[i][rank]) : Flat::ToFill(outputs[i][rank]));
            lists.push_back(BroadcastItems(topology_, flat.back().tensor(), rank, ChunkBytes()));
          }
        }
        RunPipeline(Interleave(std::move(lists)), /*reduction=*/nullptr, deadline);
        for (Flat& f : flat) f.CopyBack();
        for (Flat& f : wholes) f.CopyBack();
      });
}

c10::intrusive_ptr<Work> HierBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("hier:allgather");
  CheckSingleTensor(call, inputs);
  CheckSingleList(call, "outputs", outputs);
  return Allgather(OpType::ALLGATHER, call, outputs[0], outputs, inputs, options.timeout);
}

c10::intrusive_ptr<Work> HierBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("hier:allgather_base");
  CheckWholeOfParts(call, output, input);
  std::vector<Flat> wholes = {Flat::ToFill(output)};
  TensorLists slices = {EqualParts(wholes[0].tensor(), getSize())};
  return Allgather(OpType::_ALLGATHER_BASE, call, {output}, std::move(slices), {input},
                   options.timeout, std::move(wholes));
}

c10::intrusive_ptr<Work> HierBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("hier:allgather_coalesced");
  CheckOnePerRank(call, "lists of outputs", outputs.size());
  Tensors results;
  TensorLists by_input(inputs.size());
  for (const Tensors& of_rank : outputs) {
    CheckSameCount(call, inputs.size(), of_rank.size());
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  return Allgather(OpType::ALLGATHER_COALESCED, call, std::move(results), std::move(by_input),
                   inputs, options.timeout);
}

c10::intrusive_ptr<Work> HierBackend::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const CallName call = NameCall("hier:all_gather_single_coalesced");
  CheckSameCount(call, inputs.size(), outputs.size());
  std::vector<Flat> wholes;
  TensorLists slices;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(call, outputs[i], inputs[i]);
    wholes.push_back(Flat::ToFill(outputs[i]));
    slices.push_back(EqualParts(wholes[i].tensor(), getSize()));
  }
  return Allgather(OpType::COALESCED, call, outputs, std::move(slices), inputs, options.timeout,
                   std::move(wholes));
}

c10::intrusive_ptr<Work> HierBackend::ReduceScatter(OpType op, const CallName& call,
                                                    Tensors outputs, TensorLists inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  CheckTensors(call, outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    CheckOnePerRank(call, "inputs", inputs[i].size());
    CheckTensors(call, inputs[i]);
    CheckSameSize(call, inputs[i][getRank()], outputs[i]);
  }
  const HierReduction reduction(call, options.reduceOp, outputs);
  return Submit(op, call.operation, options.timeout, outputs,
                [this, outputs, inputs = std::move(inputs), reduction](absl::Time deadline) {
                  std::vector<Flat> flat;
                  std::vector<std::vector<Item>> lists;
                  for (size_t i = 0; i < outputs.size(); ++i) {
                    flat.push_back(Flat::ToFill(outputs[i]));
                    for (int rank = 0; rank < getSize(); ++rank) {
                      const at::Tensor input = inputs[i][rank].contiguous().view(-1);
                      lists.push_back(ReduceItems(
                          topology_, reduction.View(input),
                          rank == getRank() ? reduction.View(flat[i].tensor()) : at::Tensor(), rank,
                          ChunkBytes()));
                    }
                  }
                  RunPipeline(Interleave(std::move(lists)), &reduction, deadline);
                  for (Flat& f : flat) f.CopyBack();
                });
}

c10::intrusive_ptr<Work> HierBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("hier:reduce_scatter");
  CheckSingleTensor(call, outputs);
  CheckSingleList(call, "inputs", inputs);
  return ReduceScatter(OpType::REDUCE_SCATTER, call, outputs, inputs, options);
}

c10::intrusive_ptr<Work> HierBackend::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("hier:reduce_scatter_base");
  CheckWholeOfParts(call, input, output);
  return ReduceScatter(OpType::_REDUCE_SCATTER_BASE, call, {output},
                       {EqualParts(Flat::Of(input).tensor(), getSize())}, options);
}

c10::intrusive_ptr<Work> HierBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const CallName call = NameCall("hier:reduce_scatter_single_coalesced");
  CheckSameCount(call, inputs.size(), outputs.size());
  TensorLists slices;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckWholeOfParts(call, inputs[i], outputs[i]);
    slices.push_back(EqualParts(Flat::Of(inputs[i]).tensor(), getSize()));
  }
  return ReduceScatter(OpType::COALESCED, call, outputs, std::move(slices), options);
}

c10::intrusive_ptr<Work> HierBackend::barrier(const c10d::BarrierOptions& options) {
  const CallName call = NameCall("hier:barrier");
  return Submit(OpType::BARRIER, call.operation, options.timeout, {},
                [this, call](absl::Time deadline) {
                  const HierReduction reduction(call, c10d::ReduceOp::SUM, {});
                  RunAllreduce({at::zeros({1}, at::kByte)}, reduction, deadline);
                });
}

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
