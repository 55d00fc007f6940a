// From the arguments of a c10d collective to its Record.
//
//   recorder.Begin(Describe(Op::kAllReduce, tensors, options.reduceOp));
//
// Called at every collective: reads sizes and types, allocates nothing, and leaves it to the
// backend to refuse bad arguments.
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/watch/record.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::watch {

inline void Add(Record& record, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (record.dtype == kNoDtype) record.dtype = static_cast<int8_t>(tensor.scalar_type());
  record.Add(static_cast<uint64_t>(tensor.numel()));
}

inline void Add(Record& record, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) Add(record, tensor);
}

inline void Add(Record& record, const std::vector<std::vector<at::Tensor>>& lists) {
  for (const std::vector<at::Tensor>& tensors : lists) Add(record, tensors);
}

inline uint8_t Number(const c10d::ReduceOp& op) { return static_cast<uint8_t>(op.op_); }

template <typename Tensors>
Record Describe(Op op, const Tensors& tensors, uint8_t reduce_op = kNoReduceOp,
                int64_t root = kNoRoot) {
  Record record{.root = static_cast<int32_t>(root), .op = op, .reduce_op = reduce_op};
  Add(record, tensors);
  return record;
}

// Of gather and scatter, as elements per rank: the root alone has the `lists` of all ranks' parts,
// which may be unequal.
inline Record DescribeParts(Op op, const std::vector<at::Tensor>& own,
                            const std::vector<std::vector<at::Tensor>>& lists, int64_t root) {
  Record record = Describe(op, own, kNoReduceOp, root);
  for (const std::vector<at::Tensor>& parts : lists) {
    for (const at::Tensor& part : parts) {
      if (part.defined() && !own.empty() && own[0].defined()) {
        record.same_numel = record.same_numel && part.numel() == own[0].numel();
      }
    }
  }
  return record;
}

}  // namespace ddp::backends::watch
