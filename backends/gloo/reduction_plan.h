// What Gloo is asked to run in place of a reduction that it lacks, and what is left to do around
// it.
//
//   ReductionPlan plan = PlanReduction(at::kShort, c10d::ReduceOp::AVG);
//   // plan.dtype == at::kInt, plan.op == SUM, plan.divide: sum in int32, divide, narrow.
#pragma once

#include <optional>

#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::gloo {

// Whether Gloo moves and reduces this dtype; all others it refuses ("Invalid scalar type").
bool HasDtype(c10::ScalarType dtype);

struct ReductionPlan {
  c10::ScalarType dtype;         // what travels and is reduced; conversions round once each
  c10d::ReduceOp::RedOpType op;  // what Gloo runs
  std::optional<double> factor;  // multiplied into the input before
  bool divide = false;     // by the world size afterwards, towards zero: an average of integers
  bool is_native = false;  // Gloo does it all by itself
};

// Throws c10::Error for what no c10d backend gives a meaning (an average of bool, premul-sum of
// bool or integers), and for dtypes without a wider one that Gloo has (64-bit unsigned integers).
// Leaves to Gloo, and to its message, what Gloo refuses for good reason: bitwise operations on
// floating point, order and products of complex numbers.
ReductionPlan PlanReduction(c10::ScalarType dtype, const c10d::ReduceOp& op);

}  // namespace ddp::backends::gloo
