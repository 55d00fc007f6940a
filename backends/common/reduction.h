// c10d's reductions as the kernels take them.
//
// Of a premul-sum (ReduceOp::PREMUL_SUM) each rank multiplies its own tensors by its own factor.
// What is left is a sum, of float for half and bfloat16, so that only the sum is rounded.
#pragma once

#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "backends/common/reduce_kernels.h"
#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// Nothing for a dtype that is not reduced: float8, quantised.
std::optional<DType> ToDType(c10::ScalarType dtype);

// What is to be done with tensors of SummedAs(op, dtype). InvalidArgument for a dtype that is not
// reduced, and for what has no meaning: bitwise operations on floating point, a
// premul-sum of integers or without a factor, and the like (Check).
absl::StatusOr<Reduction> ToReduction(const c10d::ReduceOp& op, c10::ScalarType dtype,
                                      int world_size);

inline bool IsPremulSum(const c10d::ReduceOp& op) { return op.op_ == c10d::ReduceOp::PREMUL_SUM; }

c10::ScalarType SummedAs(const c10d::ReduceOp& op, c10::ScalarType dtype);

// The factor of `op`, a premul-sum that ToReduction takes, times `tensor`: new and contiguous, of
// SummedAs.
at::Tensor Premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace ddp::backends
