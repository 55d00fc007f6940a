// Collectives of GlooBackend that are made of an allreduce, an allgather or an alltoall.

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "backends/gloo/after.h"
#include "backends/gloo/gloo_backend.h"
#include "backends/gloo/reduction_plan.h"
#include "backends/gloo/tensors.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::gloo {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr GlooBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  // ProcessGroupGloo refuses tensors that are not ours.
  if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), IsOurs) ||
      (PlanReduction(tensors[0].scalar_type(), opts.reduceOp).is_native &&
       std::none_of(tensors.begin(), tensors.end(), IsOnDevice))) {
    return ProcessGroupGloo::allreduce_coalesced(tensors, opts);
  }
  std::vector<Part> parts;
  int64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    parts.push_back({offset, tensor});
    offset += tensor.numel();
  }
  return ReduceParts(OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", tensors, std::move(parts),
                     opts.reduceOp, opts.timeout);
}

WorkPtr GlooBackend::ReduceParts(OpType type, const char* name, const Tensors& inputs,
                                 std::vector<Part> parts, const c10d::ReduceOp& op,
                                 std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const c10::ScalarType dtype = inputs[0].scalar_type();
  ReductionPlan plan = PlanReduction(dtype, op);
  Tensors flat;
  for (const Tensor& input : inputs) {
    TORCH_CHECK(input.scalar_type() == dtype, "gloo: ", name, " takes tensors of one dtype, not ",
                dtype, " and ", input.scalar_type());
    flat.push_back(input.to(at::kCPU, plan.dtype).reshape({-1}));
  }
  Tensors all = {at::cat(flat)};
  if (plan.factor) all[0].mul_(*plan.factor);
  c10d::AllreduceOptions options;
  options.reduceOp = plan.op;
  options.timeout = timeout;
  Tensors outputs;
  for (const Part& part : parts) {
    TORCH_CHECK(part.output.scalar_type() == dtype, "gloo: ", name, " from ", dtype, " to ",
                part.output.scalar_type());
    outputs.push_back(part.output);
  }
  return After(ProcessGroupGloo::allreduce(all, options), type, {std::move(outputs)},
               [plan, size = getSize(), all, parts = std::move(parts)] {
                 for (const Part& part : parts) {
                   const Tensor reduced = all[0].narrow(0, part.offset, part.output.numel());
                   Finish(plan, size, reduced.view(part.output.sizes()), part.output);
                 }
               });
}

WorkPtr GlooBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1,
              "gloo: reduce_scatter takes one output and one list of inputs");
  TORCH_CHECK(static_cast<int>(inputs[0].size()) == getSize(), "gloo: reduce_scatter of ",
              inputs[0].size(), " inputs in a group of ", getSize(), " ranks");
  if (!IsOurs(outputs[0])) return ProcessGroupGloo::reduce_scatter(outputs, inputs, opts);
  TORCH_CHECK(inputs[0][getRank()].numel() == outputs[0].numel(), "gloo: reduce_scatter of ",
              inputs[0][getRank()].numel(), " elements into ", outputs[0].numel());
  int64_t offset = 0;
  for (int rank = 0; rank < getRank(); ++rank) offset += inputs[0][rank].numel();
  return ReduceParts(OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], {{offset, outputs[0]}},
                     opts.reduceOp, opts.timeout);
}

WorkPtr GlooBackend::reduce_scatter_single(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return reduce_scatter_single_coalesced(outputs, inputs, opts);
}

WorkPtr GlooBackend::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(!outputs.empty() && outputs.size() == inputs.size(), "gloo: reduce_scatter of ",
              inputs.size(), " inputs into ", outputs.size(), " outputs");
  if (!IsOurs(outputs[0])) {
    return ProcessGroupGloo::reduce_scatter_single_coalesced(outputs, inputs, opts);
  }
  std::vector<Part> parts;
  int64_t begin = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * getSize(), "gloo: reduce_scatter of ",
                inputs[i].numel(), " elements into ", outputs[i].numel(), " on each of ", getSize(),
                " ranks");
    parts.push_back({begin + outputs[i].numel() * getRank(), outputs[i]});
    begin += inputs[i].numel();
  }
  return ReduceParts(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", inputs, std::move(parts),
                     opts.reduceOp, opts.timeout);
}

WorkPtr GlooBackend::allgather_coalesced(std::vector<Tensors>& output_lists, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  // ProcessGroupGloo refuses these.
  if (inputs.empty() || !std::all_of(inputs.begin(), inputs.end(), IsOurs) ||
      static_cast<int>(output_lists.size()) != getSize()) {
    return ProcessGroupGloo::allgather_coalesced(output_lists, inputs, opts);
  }
  for (size_t rank = 0; rank < output_lists.size(); ++rank) {
    TORCH_CHECK(output_lists[rank].size() == inputs.size(), "gloo: allgather_coalesced of ",
                inputs.size(), " tensors into ", output_lists[rank].size(), " of rank ", rank);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& output = output_lists[rank][i];
      TORCH_CHECK(
          output.sizes() == inputs[i].sizes() && output.scalar_type() == inputs[i].scalar_type(),
          "gloo: allgather_coalesced of ", inputs[i].scalar_type(), " ", inputs[i].sizes(),
          " into ", output.scalar_type(), " ", output.sizes(), " of rank ", rank);
    }
  }
  const at::NoGradGuard no_grad;
  Bytes sent;
  const Tensors bytes = sent.Of(inputs);
  Bytes received;
  std::vector<Tensors> parts = received.Of(output_lists);
  return GatherParts(
      bytes, std::move(parts), output_lists, [received] { received.CopyBack(); }, opts);
}

WorkPtr GlooBackend::GatherParts(const Tensors& inputs, std::vector<Tensors> parts,
                                 std::vector<Tensors> outputs, std::function<void()> last,
                                 const c10d::AllgatherOptions& opts) {
  Tensor mine = at::cat(inputs);
  Tensor all = at::empty({mine.numel() * getSize()}, mine.options());
  return After(ProcessGroupGloo::all_gather_single(all, mine, opts), OpType::ALLGATHER_COALESCED,
               std::move(outputs), [all, parts = std::move(parts), last = std::move(last)] {
                 int64_t offset = 0;
                 for (const Tensors& of_rank : parts) {
                   for (const Tensor& part : of_rank) {
                     part.copy_(all.narrow(0, offset, part.numel()));
                     offset += part.numel();
                   }
                 }
                 last();
               });
}

WorkPtr GlooBackend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  // ProcessGroupGloo refuses these.
  if (inputs.empty() || !std::all_of(inputs.begin(), inputs.end(), IsOurs) ||
      outputs.size() != inputs.size()) {
    return ProcessGroupGloo::all_gather_single_coalesced(outputs, inputs, opts);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * getSize() &&
                    outputs[i].scalar_type() == inputs[i].scalar_type(),
                "gloo: allgather of ", inputs[i].numel(), " x ", inputs[i].scalar_type(),
                " of each of ", getSize(), " ranks does not make ", outputs[i].numel(), " x ",
                outputs[i].scalar_type());
  }
  const at::NoGradGuard no_grad;
  Bytes sent;
  const Tensors bytes = sent.Of(inputs);
  Bytes received;
  std::vector<Tensors> parts(getSize());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor flat = received.Of(outputs[i]);
    const int64_t size = bytes[i].numel();
    for (int rank = 0; rank < getSize(); ++rank) {
      parts[rank].push_back(flat.narrow(0, rank * size, size));
    }
  }
  return GatherParts(
      bytes, std::move(parts), {outputs}, [received] { received.CopyBack(); }, opts);
}

WorkPtr GlooBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& opts) {
  TORCH_CHECK(
      static_cast<int>(inputs.size()) == getSize() && static_cast<int>(outputs.size()) == getSize(),
      "gloo: alltoall of ", inputs.size(), " inputs and ", outputs.size(),
      " outputs in a group of ", getSize(), " ranks");
  const at::NoGradGuard no_grad;
  Bytes sent;
  Tensors moved_inputs = sent.Of(inputs);
  Bytes received;
  Tensors moved = received.Of(outputs);
  std::vector<int64_t> input_splits;
  for (const Tensor& input : moved_inputs) input_splits.push_back(input.numel());
  std::vector<int64_t> output_splits;
  int64_t total = 0;
  for (const Tensor& output : moved) {
    output_splits.push_back(output.numel());
    total += output.numel();
  }
  Tensor all_inputs = at::cat(moved_inputs);
  Tensor all_outputs = at::empty({total}, at::kByte);
  return After(ProcessGroupGloo::all_to_all_single(all_outputs, all_inputs, output_splits,
                                                   input_splits, opts),
               OpType::ALLTOALL, {outputs}, [received, moved, output_splits, all_outputs] {
                 const Tensors parts = all_outputs.split_with_sizes(output_splits);
                 for (size_t i = 0; i < moved.size(); ++i) moved[i].copy_(parts[i]);
                 received.CopyBack();
               });
}

}  // namespace ddp::backends::gloo
