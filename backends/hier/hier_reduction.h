// A c10d::ReduceOp in two steps: inside each host, by a backend, then across hosts, by tensor
// operations.
//
//   HierReduction reduction(call, opts.reduceOp, tensors);
//   reduction.Prepare(mine);                        // premul-sum: multiplies by this rank's factor
//   local.reduce(mine, reduction.op());             // avg and premul-sum have become sums
//   reduction.Combine({host0, host1, host2}, out);  // in this order; avg divides once
//
// fp16 and bf16 are combined in fp32 and rounded once. The local part (shm) also rounds its fp32
// sum once; so a result is rounded once per host and once at the end.
#pragma once

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "backends/common/tensor_checks.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::hier {

// Thread-safe once constructed; copyable.
class HierReduction {
 public:
  // Throws c10::Error for an operation that c10d or the dtypes of `tensors` do not have.
  HierReduction(const CallName& call, const c10d::ReduceOp& op,
                const std::vector<at::Tensor>& tensors);

  // The operation for the backend of the local part.
  c10d::ReduceOp op() const { return op_; }

  // Call it on this rank's tensor before anything else. It works in place.
  void Prepare(at::Tensor& data) const;

  // Reduces `parts` (two or more, of one shape and dtype) from left to right to `out`, which may be
  // one of them. The other parts may be overwritten.
  void Combine(absl::Span<const at::Tensor> parts, at::Tensor& out) const;

  // A view for op(): complex numbers as pairs of real numbers, others unchanged.
  at::Tensor View(const at::Tensor& tensor) const;

 private:
  void Apply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) const;

  c10d::ReduceOp::RedOpType op_;
  std::optional<int> divisor_;
  c10::intrusive_ptr<c10d::PreMulSumSupplement> factor_;
};

}  // namespace ddp::backends::hier
