// Translates c10d's reduce operations and dtypes to those of reduce_kernels.h.
//
//   DDP_ASSIGN_OR_RETURN(Reduction sum, ToReduction(c10d::ReduceOp::SUM, at::kFloat, world_size));
//
// In a premul-sum (ReduceOp::PREMUL_SUM) each rank multiplies its own tensors by its own factor;
// the rest is a sum. For half and bfloat16 this sum is in float, so that only the result is
// rounded. Thread-safe: no state.
#pragma once

#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "backends/common/reduce_kernels.h"
#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// Null for dtypes without reductions: float8, quantised.
std::optional<DType> ToDType(c10::ScalarType dtype);

// The reduction of tensors of dtype SummedAs(op, dtype). InvalidArgument for dtypes without
// reductions, and for operations without a meaning: bitwise operations on floating point, a
// premul-sum of integers or without a factor, and others (Check in reduce_kernels.h).
absl::StatusOr<Reduction> ToReduction(const c10d::ReduceOp& op, c10::ScalarType dtype,
                                      int world_size);

inline bool IsPremulSum(const c10d::ReduceOp& op) { return op.op_ == c10d::ReduceOp::PREMUL_SUM; }

// The dtype in which tensors of `dtype` are added up.
c10::ScalarType SummedAs(const c10d::ReduceOp& op, c10::ScalarType dtype);

// A new, contiguous tensor of dtype SummedAs: `tensor` times the factor of `op`, a premul-sum that
// ToReduction accepts.
at::Tensor Premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace ddp::backends
