#include "backends/conformance/start.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::conformance {
namespace {

constexpr uint8_t kGuard = 0xa5;
constexpr int64_t kOffset = 3;  // elements: no alignment beyond the element's own

at::Tensor Guarded(int64_t count, at::TensorOptions options) {
  at::Tensor base = at::empty({count}, options.device(at::kCPU));
  std::memset(base.data_ptr(), kGuard, base.nbytes());
  return base.to(options.device());
}

// The elements of `tensor` in logical order, on the CPU: `tensor` itself if it is so already.
at::Tensor InOrder(const at::Tensor& tensor) { return tensor.contiguous().cpu(); }

absl::Span<const uint8_t> Bytes(const at::Tensor& in_order) {
  return {static_cast<const uint8_t*>(in_order.data_ptr()), in_order.nbytes()};
}

// Writes what `rank` puts into its input number `input`.
void Fill(const Values& values, int rank, int input, const at::Tensor& tensor) {
  const bool direct = tensor.is_cpu() && tensor.is_contiguous();
  const at::Tensor in_order =
      direct ? tensor : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  auto* out = static_cast<uint8_t*>(in_order.data_ptr());
  for (int64_t done = 0; done < tensor.numel(); done += Values::kBlock) {
    const std::vector<uint8_t> bytes =
        values.Input(rank, input, done, std::min(Values::kBlock, tensor.numel() - done));
    out = std::copy(bytes.begin(), bytes.end(), out);
  }
  if (!direct) tensor.copy_(in_order);
}

std::vector<at::Tensor> Views(const std::vector<GuardedTensor>& buffers) {
  std::vector<at::Tensor> views;
  for (const GuardedTensor& buffer : buffers) views.push_back(buffer.view);
  return views;
}

absl::Status CheckSurroundings(const GuardedTensor& buffer, absl::string_view what) {
  if (!buffer.base.defined()) return absl::OkStatus();
  at::Tensor now = buffer.base.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  const at::Tensor& view = buffer.view;
  const auto restore = [&](const at::Tensor& memory) {
    return memory.as_strided(view.sizes(), view.strides(), view.storage_offset());
  };
  restore(now).copy_(restore(buffer.original));
  if (std::memcmp(now.data_ptr(), buffer.original.data_ptr(), now.nbytes()) == 0) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("memory around ", what, " was written to"));
}

template <typename Options>
Options WithMode(Mode mode) {
  Options options;
  options.asyncOp = mode != Mode::kSync;
  return options;
}

template <typename Options>
Options WithReduction(const Case& c, int rank) {
  auto options = WithMode<Options>(c.mode);
  options.reduceOp = ToReduceOp(c.reduction, rank);
  return options;
}

}  // namespace

c10d::ReduceOp ToReduceOp(ReductionOp reduction, int rank) {
  switch (reduction) {
    case ReductionOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReductionOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case ReductionOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReductionOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReductionOp::kBand:
      return c10d::ReduceOp::BAND;
    case ReductionOp::kBor:
      return c10d::ReduceOp::BOR;
    case ReductionOp::kBxor:
      return c10d::ReduceOp::BXOR;
    case ReductionOp::kPremulSum:
      return c10d::makePreMulSum(PremulFactor(rank));
    case ReductionOp::kSum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

Running::Running(c10d::Backend& backend, const Traits& traits, const Case& c, uint64_t salt)
    : backend_(backend),
      case_(c),
      salt_(salt),
      traits_(traits),
      root_(Root(salt, backend.getSize())),
      plan_(MakePlan(c.op, c.count, backend.getSize(), backend.getRank(), root_)),
      values_(c, backend.getSize(), salt) {
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    inputs_.push_back(MakeBuffer(plan_.inputs[i]));
    Fill(values_, backend.getRank(), i, inputs_[i].view);
  }
  if (plan_.in_place) {
    outputs_ = inputs_;
  } else {
    for (const auto& output : plan_.outputs) outputs_.push_back(MakeBuffer(TotalCount(output)));
  }
  input_tensors_ = Views(inputs_);
  output_tensors_ = Views(outputs_);
  Call();
}

GuardedTensor Running::MakeBuffer(int64_t count) const {
  const auto options = at::TensorOptions(case_.dtype).device(std::string(traits_.device));
  GuardedTensor buffer;
  switch (case_.layout) {
    case TensorLayout::kContiguous:
      buffer.view = at::empty({count}, options);
      return buffer;
    case TensorLayout::kPermuted: {
      // Two columns wherever the message has an even size: the tensors that hold several of them
      // are the messages' rows, one after the other.
      const bool even = count % 2 == 0 && case_.count % 2 == 0;
      buffer.view = at::empty({even ? 2 : 1, even ? count / 2 : count}, options).t();
      return buffer;
    }
    case TensorLayout::kOffset:
      buffer.base = Guarded(count + 2 * kOffset, options);
      buffer.view = buffer.base.narrow(0, kOffset, count);
      break;
    case TensorLayout::kStrided:
      buffer.base = Guarded(2 * count + 1, options);
      buffer.view = buffer.base.slice(0, 1, 2 * count + 1, 2);
      break;
  }
  buffer.original = buffer.base.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  return buffer;
}

void Running::Call() {
  const Mode mode = case_.mode;
  const auto work = [this](c10::intrusive_ptr<c10d::Work> w) { works_.push_back(std::move(w)); };
  const auto gather = WithMode<c10d::AllgatherOptions>(mode);
  const auto all_to_all = WithMode<c10d::AllToAllOptions>(mode);
  switch (case_.op) {
    case Op::kAllreduce:
      return work(backend_.allreduce(
          input_tensors_, WithReduction<c10d::AllreduceOptions>(case_, backend_.getRank())));
    case Op::kAllreduceCoalesced:
      return work(backend_.allreduce_coalesced(
          input_tensors_,
          WithReduction<c10d::AllreduceCoalescedOptions>(case_, backend_.getRank())));
    case Op::kReduce: {
      auto options = WithReduction<c10d::ReduceOptions>(case_, backend_.getRank());
      options.rootRank = root_;
      return work(backend_.reduce(input_tensors_, options));
    }
    case Op::kReduceScatter:
      input_lists_ = {input_tensors_};
      return work(backend_.reduce_scatter(
          output_tensors_, input_lists_,
          WithReduction<c10d::ReduceScatterOptions>(case_, backend_.getRank())));
    case Op::kReduceScatterBase:
      return work(backend_.reduce_scatter_single(
          output_tensors_[0], input_tensors_[0],
          WithReduction<c10d::ReduceScatterOptions>(case_, backend_.getRank())));
    case Op::kReduceScatterCoalesced:
      return work(backend_.reduce_scatter_single_coalesced(
          output_tensors_, input_tensors_,
          WithReduction<c10d::ReduceScatterOptions>(case_, backend_.getRank())));
    case Op::kAllgather:
    case Op::kAllgatherUnequal:
      output_lists_ = {output_tensors_};
      return work(backend_.allgather(output_lists_, input_tensors_, gather));
    case Op::kAllgatherBase:
      return work(backend_.all_gather_single(output_tensors_[0], input_tensors_[0], gather));
    case Op::kAllgatherIntoTensorCoalesced:
      return work(backend_.all_gather_single_coalesced(output_tensors_, input_tensors_, gather));
    case Op::kAllgatherCoalesced:
      for (size_t i = 0; i < output_tensors_.size(); i += input_tensors_.size()) {
        output_lists_.emplace_back(output_tensors_.begin() + i,
                                   output_tensors_.begin() + i + input_tensors_.size());
      }
      return work(backend_.allgather_coalesced(output_lists_, input_tensors_, gather));
    case Op::kBroadcast: {
      auto options = WithMode<c10d::BroadcastOptions>(mode);
      options.rootRank = root_;
      return work(backend_.broadcast(input_tensors_, options));
    }
    case Op::kGather: {
      auto options = WithMode<c10d::GatherOptions>(mode);
      options.rootRank = root_;
      if (backend_.getRank() == root_) output_lists_ = {output_tensors_};
      return work(backend_.gather(output_lists_, input_tensors_, options));
    }
    case Op::kScatter: {
      auto options = WithMode<c10d::ScatterOptions>(mode);
      options.rootRank = root_;
      if (backend_.getRank() == root_) input_lists_ = {input_tensors_};
      return work(backend_.scatter(output_tensors_, input_lists_, options));
    }
    case Op::kAlltoall:
      return work(backend_.alltoall(output_tensors_, input_tensors_, all_to_all));
    case Op::kAlltoallBaseUnequal:
      for (int peer = 0; peer < backend_.getSize(); ++peer) {
        input_splits_.push_back(MessageSize(case_.op, case_.count, backend_.getRank(), peer));
        output_splits_.push_back(MessageSize(case_.op, case_.count, peer, backend_.getRank()));
      }
      [[fallthrough]];
    case Op::kAlltoallBase:
      return work(backend_.all_to_all_single(output_tensors_[0], input_tensors_[0], output_splits_,
                                             input_splits_, all_to_all));
    case Op::kSendRecv:
      return SendAroundTheRing();
    case Op::kRecvAnysource:
      return ReceiveFromAnySource();
    case Op::kBarrier:
      return work(backend_.barrier(WithMode<c10d::BarrierOptions>(mode)));
    case Op::kMonitoredBarrier:
      return backend_.monitoredBarrier(WithMode<c10d::BarrierOptions>(mode), /*unused=*/true);
  }
}

// Two messages to the next rank; they are received in the other order than they were sent.
void Running::SendAroundTheRing() {
  const int size = backend_.getSize(), rank = backend_.getRank();
  const int tag = static_cast<int>(salt_ % (1 << 20)) * 2;
  const auto send = [&](int i) {
    std::vector<at::Tensor> tensors = {input_tensors_[i]};
    works_.push_back(backend_.send(tensors, (rank + 1) % size, tag + i));
  };
  const auto receive = [&](int i) {
    std::vector<at::Tensor> tensors = {output_tensors_[i]};
    works_.push_back(backend_.recv(tensors, (rank + size - 1) % size, tag + i));
  };
  send(0);
  send(1);
  receive(1);
  receive(0);
}

void Running::ReceiveFromAnySource() {
  const int tag = static_cast<int>(salt_ % (1 << 20)) * 2;
  if (backend_.getRank() != root_) {
    works_.push_back(backend_.send(input_tensors_, root_, tag));
    return;
  }
  for (const at::Tensor& output : output_tensors_) {
    std::vector<at::Tensor> tensors = {output};
    works_.push_back(backend_.recvAnysource(tensors, tag));
  }
}

absl::Status Running::Finish() {
  for (auto& work : works_) {
    DDP_RETURN_IF_ERROR(CatchStatus(Name(case_.op), [&] {
      if (!work->wait()) throw std::runtime_error("wait() says that the work was aborted");
    }));
  }
  return Annotate(Check(), absl::StrCat(CaseName(case_), " with salt ", salt_, ", rank ",
                                        backend_.getRank(), " of ", backend_.getSize()));
}

absl::Status Running::Check() {
  std::vector<at::Tensor> actual;
  for (const GuardedTensor& output : outputs_) actual.push_back(output.view);
  if (case_.op == Op::kRecvAnysource && backend_.getRank() == root_) {
    // The outputs are sorted into the plan's order, that of ranks.
    std::vector<at::Tensor> by_source(actual.size());
    std::vector<bool> seen(backend_.getSize());
    for (size_t i = 0; i < works_.size(); ++i) {
      const int source = works_[i]->sourceRank();
      if (source < 0 || source >= backend_.getSize() || source == root_ || seen[source]) {
        return absl::DataLossError(absl::StrCat("a message is said to be from rank ", source));
      }
      seen[source] = true;
      by_source[source - (source > root_ ? 1 : 0)] = std::move(actual[i]);
    }
    actual = std::move(by_source);
  }
  for (size_t i = 0; i < plan_.outputs.size(); ++i) {
    DDP_RETURN_IF_ERROR(
        Annotate(values_.Compare(plan_.outputs[i], Bytes(InOrder(actual[i])), traits_.exactness),
                 absl::StrCat("output ", i)));
    DDP_RETURN_IF_ERROR(CheckSurroundings(outputs_[i], absl::StrCat("output ", i)));
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    DDP_RETURN_IF_ERROR(CheckSurroundings(inputs_[i], absl::StrCat("input ", i)));
    if (plan_.in_place) continue;
    const Segment whole = {backend_.getRank(), static_cast<int>(i), 0, plan_.inputs[i]};
    DDP_RETURN_IF_ERROR(
        Annotate(values_.Compare({whole}, Bytes(InOrder(inputs_[i].view)), Exactness::kBits),
                 absl::StrCat("input ", i, ", written to")));
  }
  return absl::OkStatus();
}

std::vector<uint8_t> Running::OutputBytes() const {
  std::vector<uint8_t> all;
  for (const GuardedTensor& output : outputs_) {
    const at::Tensor in_order = InOrder(output.view);
    const absl::Span<const uint8_t> bytes = Bytes(in_order);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

}  // namespace ddp::backends::conformance
