// Makes the CallRecord of a c10d collective from the arguments of the call.
//
//   recorder.Begin(MakeRecord(CollectiveKind::kAllReduce, tensors, Number(options.reduceOp)));
//
// Called at every collective: reads sizes and types only and allocates nothing. Does not validate
// the arguments; the backend does.
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/watch/call_record.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::watch {

inline void Add(CallRecord& record, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (record.dtype == kNoDtype) record.dtype = static_cast<int8_t>(tensor.scalar_type());
  record.Add(static_cast<uint64_t>(tensor.numel()));
}

inline void Add(CallRecord& record, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) Add(record, tensor);
}

inline void Add(CallRecord& record, const std::vector<std::vector<at::Tensor>>& lists) {
  for (const std::vector<at::Tensor>& tensors : lists) Add(record, tensors);
}

inline uint8_t Number(const c10d::ReduceOp& op) { return static_cast<uint8_t>(op.op_); }

template <typename Tensors>
CallRecord MakeRecord(CollectiveKind kind, const Tensors& tensors, uint8_t reduce_op = kNoReduceOp,
                      int64_t root = kNoRoot) {
  CallRecord record{.root = static_cast<int32_t>(root), .kind = kind, .reduce_op = reduce_op};
  Add(record, tensors);
  return record;
}

// Records the elements of one rank's part, `own`, for gather and scatter. Only the root has
// `lists`, the parts of all ranks, which may have different sizes.
inline CallRecord MakePartsRecord(CollectiveKind kind, const std::vector<at::Tensor>& own,
                                  const std::vector<std::vector<at::Tensor>>& lists, int64_t root) {
  CallRecord record = MakeRecord(kind, own, kNoReduceOp, root);
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
