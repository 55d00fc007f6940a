// How to compute a reduction that Gloo lacks: by another reduction of Gloo's, with steps before and
// after it.
//
//   ReductionPlan plan = PlanReduction(at::kShort, c10d::ReduceOp::AVG);
//   // plan.dtype == at::kInt, plan.op == SUM, plan.divide: sum in int32, divide, narrow.
#pragma once

#include <optional>

#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::gloo {

// Whether Gloo supports this dtype; it refuses all others ("Invalid scalar type").
bool HasDtype(c10::ScalarType dtype);

struct ReductionPlan {
  c10::ScalarType dtype;         // in which Gloo sends and reduces; each conversion rounds once
  c10d::ReduceOp::RedOpType op;  // Gloo's operation
  std::optional<double> factor;  // multiply the input by it before
  bool divide = false;     // divide by the world size afterwards, towards zero: average of integers
  bool is_native = false;  // Gloo needs no steps before and after
};

// Thread-safe: no state. Throws c10::Error for reductions that no c10d backend supports (an average
// of bool, premul-sum of bool or integers), and for dtypes without a wider one in Gloo (64-bit
// unsigned integers). Bitwise operations on floating point, and order and products of complex
// numbers, are passed on to Gloo, which refuses them with its own message.
ReductionPlan PlanReduction(c10::ScalarType dtype, const c10d::ReduceOp& op);

}  // namespace ddp::backends::gloo
