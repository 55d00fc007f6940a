// What a c10d::ReduceOp means when it is done in two steps: inside the hosts, then across them.
//
//   HierReduction reduction(call, opts.reduceOp, tensors);
//   reduction.Prepare(mine);                        // premul-sum: each rank's own factor
//   local.reduce(mine, reduction.op());             // avg and premul-sum are sums by now
//   reduction.Combine({host0, host1, host2}, out);  // in this order; avg divides, once
//
// fp16 and bf16 are combined in fp32 and rounded once; with what the local part does (shm rounds
// its fp32 sum once), a result is rounded once per host and once at the end.
#pragma once

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "backends/common/tensor_checks.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::hier {

class HierReduction {
 public:
  // Throws c10::Error for an operation that is not c10d's, or makes no sense of these tensors.
  HierReduction(const CallName& call, const c10d::ReduceOp& op,
                const std::vector<at::Tensor>& tensors);

  // The operation that is left for backends to do.
  c10d::ReduceOp op() const { return op_; }

  void Prepare(at::Tensor& data) const;

  // `out` = `parts` (two or more, of one shape and dtype) reduced from left to right; it may be one
  // of them. The others may be overwritten.
  void Combine(absl::Span<const at::Tensor> parts, at::Tensor& out) const;

  // A view that op() can be done on: of complex numbers, sums are done on their parts.
  at::Tensor View(const at::Tensor& tensor) const;

 private:
  void Apply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) const;

  c10d::ReduceOp::RedOpType op_;
  std::optional<int> divisor_;
  c10::intrusive_ptr<c10d::NCCLPreMulSumSupplement> factor_;
};

}  // namespace ddp::backends::hier
