#include "backends/gloo/gloo_backend.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "backends/common/join.h"
#include "backends/common/sparse.h"
#include "backends/gloo/after.h"
#include "backends/gloo/reduction_plan.h"
#include "backends/gloo/tensors.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::gloo {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Abort takes one tag for each network, from the last one down; barriers take those below.
constexpr int kLastTag = std::numeric_limits<int>::max();
constexpr int kAbortTags = 64;
constexpr int kFirstBarrierTag = kLastTag - (1 << 20);
constexpr int kBarrierTags = kLastTag - kAbortTags - kFirstBarrierTag;

// ProcessGroupGloo's monitored barrier calls send and recv of this class, with the number of
// previous collectives as the tag.
thread_local bool in_monitored_barrier = false;

int TagOnTheWire(int tag) {
  if (in_monitored_barrier) {
    return kFirstBarrierTag + static_cast<int>(static_cast<uint32_t>(tag) % kBarrierTags);
  }
  TORCH_CHECK(tag < kFirstBarrierTag, "gloo: tag ", tag,
              " is one of those that monitored barriers and abort use; choose one below ",
              kFirstBarrierTag);
  return tag;
}

// The tensor that Gloo reduces instead of `tensor`: itself if possible, otherwise a copy.
Tensor Prepare(const ReductionPlan& plan, const Tensor& tensor) {
  const Tensor prepared = tensor.to(at::kCPU, plan.dtype).contiguous();
  return plan.factor ? prepared.mul(*plan.factor) : prepared;
}

// The tensors, or copies of those that are on another device.
Tensors OnCpu(const Tensors& tensors) {
  Tensors moved;
  for (const Tensor& tensor : tensors) moved.push_back(IsOnDevice(tensor) ? tensor.cpu() : tensor);
  return moved;
}

// A received message for a tensor of another device. Gloo's messages have no future: whoever waits
// copies.
class DeviceMessage final : public c10d::Work {
 public:
  DeviceMessage(WorkPtr message, Tensors tensors, Tensors moved)
      : Work(/*rank=*/-1, message->retrieveOpType()),
        message_(std::move(message)),
        tensors_(std::move(tensors)),
        moved_(std::move(moved)) {}

  bool isCompleted() override { return message_->isCompleted(); }
  bool isSuccess() const override { return message_->isSuccess(); }
  std::exception_ptr exception() const override { return message_->exception(); }
  int sourceRank() const override { return message_->sourceRank(); }
  std::vector<Tensor> result() override { return tensors_; }
  void abort() override { message_->abort(); }
  uint64_t getSequencenumber() const override { return message_->getSequencenumber(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!message_->wait(timeout)) return false;
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].copy_(moved_[i]);
    return true;
  }

 private:
  const WorkPtr message_;
  const Tensors tensors_;
  const Tensors moved_;
};

WorkPtr CopiedAtTheEnd(WorkPtr message, const Tensors& tensors, const Tensors& moved) {
  if (std::none_of(tensors.begin(), tensors.end(), IsOnDevice)) return message;
  return c10::make_intrusive<DeviceMessage>(std::move(message), tensors, moved);
}

void ThrowUnlessOk(const absl::Status& status, absl::string_view doing) {
  if (status.ok()) return;
  C10_THROW_ERROR(DistBackendError, absl::StrCat("gloo: ", doing, ": ", status.message()));
}

int64_t NumBytes(const Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

c10::intrusive_ptr<GlooBackend::Options> GlooBackend::OptionsOfNewGroup(
    const Backend::Options& opts) {
  auto options = Options::create(opts.timeout);
  options->devices = getOptions()->devices;
  options->threads = getOptions()->threads;
  options->group_name = opts.group_name;
  return options;
}

c10::intrusive_ptr<c10d::Backend> GlooBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  const auto options = OptionsOfNewGroup(*opts);
  const std::vector<uint64_t>& global = getOptions()->global_ranks_in_group;
  for (int rank : ranks) {
    options->global_ranks_in_group.push_back(global.empty() ? rank : global.at(rank));
  }
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  const int rank = static_cast<int>(mine - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  ThrowUnlessOk(WaitForAllRanks(*prefixed, rank, size, join_timeout_),
                absl::StrCat("splitting off ranks ", absl::StrJoin(ranks, ", ")));
  return c10::make_intrusive<GlooBackend>(prefixed, rank, size, options, join_timeout_);
}

c10::intrusive_ptr<c10d::Backend> GlooBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Backend::Options>& opts,
    const int& rank, const int& size) {
  const auto options = OptionsOfNewGroup(*opts);
  // Other groups may have been merged with this store: each rank counts them to the same number.
  const int64_t number = store->add(absl::StrCat("gloo/merges/", rank), 1);
  const auto prefixed =
      c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("gloo/merge/", number), store);
  ThrowUnlessOk(WaitForAllRanks(*prefixed, rank, size, join_timeout_), "merging groups");
  return c10::make_intrusive<GlooBackend>(prefixed, rank, size, options, join_timeout_);
}

c10d::ErrorType GlooBackend::getError() {
  return aborted_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

// When one wait times out, Gloo fails all pending operations of that network and closes all its
// connections. So this makes one wait on each time out. A receive from a dead peer would fail at
// once and close no other connection. The tag says which network.
void GlooBackend::abort() {
  aborted_ = true;
  const int networks = std::min<int>(static_cast<int>(getOptions()->devices.size()), kAbortTags);
  for (int network = 0; network < networks; ++network) {
    for (int i = 1; i < getSize(); ++i) {
      Tensors nothing = {at::empty({1}, at::kByte)};
      try {
        ProcessGroupGloo::recv(nothing, (getRank() + i) % getSize(), kLastTag - network)
            ->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // The timeout, or the connection had been closed before.
      }
    }
  }
  // Gloo sometimes does not complete a send when its connection breaks.
  const std::lock_guard<std::mutex> lock(barriers_mutex_);
  for (const WorkPtr& message : barrier_messages_) message->abort();
}

WorkPtr GlooBackend::Remember(WorkPtr message) {
  if (in_monitored_barrier) {
    const std::lock_guard<std::mutex> lock(barriers_mutex_);
    barrier_messages_.push_back(message);
  }
  return message;
}

WorkPtr GlooBackend::send(Tensors& tensors, int dst, int tag) {
  Tensors moved = OnCpu(tensors);
  return Remember(ProcessGroupGloo::send(moved, dst, TagOnTheWire(tag)));
}

WorkPtr GlooBackend::recv(Tensors& tensors, int src, int tag) {
  Tensors moved = OnCpu(tensors);
  WorkPtr message = Remember(ProcessGroupGloo::recv(moved, src, TagOnTheWire(tag)));
  return CopiedAtTheEnd(std::move(message), tensors, moved);
}

WorkPtr GlooBackend::recvAnysource(Tensors& tensors, int tag) {
  Tensors moved = OnCpu(tensors);
  WorkPtr message = ProcessGroupGloo::recvAnysource(moved, TagOnTheWire(tag));
  return CopiedAtTheEnd(std::move(message), tensors, moved);
}

void GlooBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  {
    const std::lock_guard<std::mutex> lock(barriers_mutex_);
    ++barriers_;
  }
  in_monitored_barrier = true;
  const absl::Cleanup out = [this] {
    in_monitored_barrier = false;
    const std::lock_guard<std::mutex> lock(barriers_mutex_);
    if (--barriers_ == 0) barrier_messages_.clear();
  };
  try {
    ProcessGroupGloo::monitoredBarrier(opts, wait_all_ranks);
  } catch (const c10::Error& error) {
    // c10d's type for wrong arguments, for which watch looks for no dead rank.
    C10_THROW_ERROR(DistBackendError, error.what_without_backtrace());
  }
  // ProcessGroupGloo takes the end of a wait for success.
  if (aborted_) C10_THROW_ERROR(DistBackendError, "gloo: the monitored barrier was aborted");
}

WorkPtr GlooBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (IsSparse(tensors) && tensors[0].device().is_cpu()) {
    return SparseAllReduce(*this, tensors, opts);
  }
  if (tensors.empty() || !IsOurs(tensors[0])) return ProcessGroupGloo::allreduce(tensors, opts);
  const ReductionPlan plan = PlanReduction(tensors[0].scalar_type(), opts.reduceOp);
  if (CanReduce(plan, tensors)) return ProcessGroupGloo::allreduce(tensors, opts);
  const at::NoGradGuard no_grad;
  Tensors prepared;
  for (const Tensor& tensor : tensors) prepared.push_back(Prepare(plan, tensor));
  c10d::AllreduceOptions options = opts;
  options.reduceOp = plan.op;
  return After(ProcessGroupGloo::allreduce(prepared, options), OpType::ALLREDUCE, {tensors},
               [plan, size = getSize(), prepared, tensors] {
                 for (size_t i = 0; i < tensors.size(); ++i) {
                   Finish(plan, size, prepared[i], tensors[i]);
                 }
               });
}

WorkPtr GlooBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  if (tensors.size() != 1 || !IsOurs(tensors[0])) return ProcessGroupGloo::reduce(tensors, opts);
  const ReductionPlan plan = PlanReduction(tensors[0].scalar_type(), opts.reduceOp);
  if (CanReduce(plan, tensors)) return ProcessGroupGloo::reduce(tensors, opts);
  const at::NoGradGuard no_grad;
  Tensors prepared = {Prepare(plan, tensors[0])};
  c10d::ReduceOptions options = opts;
  options.reduceOp = plan.op;
  const bool is_root = opts.rootRank == getRank();
  return After(ProcessGroupGloo::reduce(prepared, options), OpType::REDUCE, {tensors},
               [plan, size = getSize(), is_root, prepared, tensors] {
                 // The tensors of other ranks are unspecified.
                 if (is_root) Finish(plan, size, prepared[0], tensors[0]);
               });
}

WorkPtr GlooBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (!AnyIsForeign(tensors) && !AnyHasGaps(tensors)) {
    return ProcessGroupGloo::broadcast(tensors, opts);
  }
  const at::NoGradGuard no_grad;
  Bytes bytes;
  Tensors moved = bytes.Of(tensors);
  return After(ProcessGroupGloo::broadcast(moved, opts), OpType::BROADCAST, {tensors},
               [bytes] { bytes.CopyBack(); });
}

WorkPtr GlooBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  if (inputs.size() != 1 || outputs.size() != 1 || !IsOurs(inputs[0]) ||
      static_cast<int>(outputs[0].size()) != getSize()) {
    return ProcessGroupGloo::allgather(outputs, inputs, opts);
  }
  int64_t longest = 0;
  bool unequal = false;
  for (const Tensor& output : outputs[0]) {
    longest = std::max(longest, NumBytes(output));
    unequal = unequal || output.numel() != outputs[0][0].numel();
  }
  if (!unequal && !IsForeign(inputs[0])) return ProcessGroupGloo::allgather(outputs, inputs, opts);
  for (const Tensor& output : outputs[0]) {
    TORCH_CHECK(output.scalar_type() == inputs[0].scalar_type(), "gloo: allgather from ",
                inputs[0].scalar_type(), " to ", output.scalar_type());
  }
  TORCH_CHECK(inputs[0].numel() == outputs[0][getRank()].numel(), "gloo: allgather on rank ",
              getRank(), " of ", inputs[0].numel(), " elements, where its output has ",
              outputs[0][getRank()].numel());
  const at::NoGradGuard no_grad;
  Bytes bytes;
  Tensors input = {bytes.Of(inputs[0])};
  std::vector<Tensors> moved = {bytes.Of(outputs[0])};
  if (!unequal) {
    return After(ProcessGroupGloo::allgather(moved, input, opts), OpType::ALLGATHER, outputs,
                 [bytes] { bytes.CopyBack(); });
  }
  // Every message has the size of the longest one, which all ranks know from their outputs.
  Tensors padded_input = {at::empty({longest}, at::kByte)};
  padded_input[0].narrow(0, 0, input[0].numel()).copy_(input[0]);
  std::vector<Tensors> padded(1);
  for (size_t i = 0; i < moved[0].size(); ++i) {
    padded[0].push_back(at::empty({longest}, at::kByte));
  }
  return After(ProcessGroupGloo::allgather(padded, padded_input, opts), OpType::ALLGATHER, outputs,
               [bytes, moved, padded] {
                 for (size_t i = 0; i < moved[0].size(); ++i) {
                   moved[0][i].copy_(padded[0][i].narrow(0, 0, moved[0][i].numel()));
                 }
                 bytes.CopyBack();
               });
}

WorkPtr GlooBackend::all_gather_single(Tensor& output, Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  // Checked before sending: the ranks would divide such an output differently, and some would wait.
  TORCH_CHECK(
      output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "gloo: allgather of ", input.numel(), " x ", input.scalar_type(), " of each of ", getSize(),
      " ranks does not make ", output.numel(), " x ", output.scalar_type());
  return ProcessGroupGloo::all_gather_single(output, input, opts);
}

WorkPtr GlooBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  if (!AnyIsForeign(inputs)) return ProcessGroupGloo::gather(outputs, inputs, opts);
  const at::NoGradGuard no_grad;
  Bytes bytes;
  Tensors moved_inputs = bytes.Of(inputs);
  std::vector<Tensors> moved = bytes.Of(outputs);
  return After(ProcessGroupGloo::gather(moved, moved_inputs, opts), OpType::GATHER, outputs,
               [bytes] { bytes.CopyBack(); });
}

WorkPtr GlooBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& opts) {
  bool gaps = AnyHasGaps(outputs);
  for (const Tensors& list : inputs) gaps = gaps || AnyHasGaps(list);
  if (!gaps && !AnyIsForeign(outputs)) return ProcessGroupGloo::scatter(outputs, inputs, opts);
  const at::NoGradGuard no_grad;
  Bytes sent;
  std::vector<Tensors> moved_inputs = sent.Of(inputs);
  Bytes received;
  Tensors moved = received.Of(outputs);
  return After(ProcessGroupGloo::scatter(moved, moved_inputs, opts), OpType::SCATTER, {outputs},
               [received] { received.CopyBack(); });
}

WorkPtr GlooBackend::all_to_all_single(Tensor& output, Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& opts) {
  if (!IsForeign(input)) {
    return ProcessGroupGloo::all_to_all_single(output, input, output_splits, input_splits, opts);
  }
  TORCH_CHECK(output.is_contiguous() && input.is_contiguous(),
              "gloo: all_to_all_single takes contiguous tensors");
  TORCH_CHECK(input.dim() > 0 && output.dim() > 0 &&
                  (!input_splits.empty() || input.size(0) % getSize() == 0) &&
                  (!output_splits.empty() || output.size(0) % getSize() == 0),
              "gloo: all_to_all_single without splits takes tensors whose first dimension the ",
              getSize(), " ranks divide");
  // Splits count rows, so tensors need a first dimension.
  const auto in_bytes = [](const std::vector<int64_t>& splits, const Tensor& tensor) {
    std::vector<int64_t> bytes;
    for (int64_t rows : splits) {
      bytes.push_back(tensor.size(0) == 0 ? 0 : rows * (NumBytes(tensor) / tensor.size(0)));
    }
    return bytes;
  };
  const at::NoGradGuard no_grad;
  Bytes bytes;
  Tensor moved_input = bytes.Of(input);
  Tensor moved = bytes.Of(output);
  std::vector<int64_t> moved_output_splits = in_bytes(output_splits, output);
  std::vector<int64_t> moved_input_splits = in_bytes(input_splits, input);
  return After(ProcessGroupGloo::all_to_all_single(moved, moved_input, moved_output_splits,
                                                   moved_input_splits, opts),
               OpType::ALLTOALL_BASE, {{output}}, [bytes] { bytes.CopyBack(); });
}

}  // namespace ddp::backends::gloo
