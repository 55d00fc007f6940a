#include "backends/gloo/reduction_plan.h"

#include "ATen/core/Tensor.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::gloo {
namespace {

using c10::ScalarType;
using c10d::ReduceOp;

// The dtype in which Gloo reduces values of another dtype. Exact for integers: narrowed sums wrap
// around in the same way.
ScalarType Wider(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Short:
    case ScalarType::UInt16:
      return ScalarType::Int;
    case ScalarType::UInt32:
      return ScalarType::Long;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return ScalarType::Float;
    case ScalarType::ComplexHalf:
      return ScalarType::ComplexFloat;
    default:
      return dtype;
  }
}

double FactorOf(const ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "gloo: PREMUL_SUM without a factor; see makePreMulSum");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item().toDouble()
                                             : supplement->double_factor;
}

}  // namespace

bool HasDtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Char:
    case ScalarType::Byte:
    case ScalarType::Bool:
    case ScalarType::Int:
    case ScalarType::Long:
      return true;
    default:
      return false;
  }
}

ReductionPlan PlanReduction(ScalarType dtype, const ReduceOp& op) {
  ReductionPlan plan{.dtype = Wider(dtype), .op = op.op_, .factor = {}};
  const bool integral = c10::isIntegralType(dtype, /*includeBool=*/false);
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    TORCH_CHECK(dtype != ScalarType::Bool && !integral, "gloo: PREMUL_SUM of ", dtype,
                " has no meaning: the factor is a real number; convert to a floating-point dtype");
    // 16-bit sums of 16-bit products would round twice.
    if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) plan.dtype = ScalarType::Float;
    plan.op = ReduceOp::SUM;
    plan.factor = FactorOf(op);
    return plan;
  }
  if (dtype == ScalarType::Bool) {
    TORCH_CHECK(op.op_ != ReduceOp::AVG,
                "gloo: AVG of bool has no meaning; convert to a floating-point dtype");
    // Gloo would add bytes, but the only valid true value of a bool is 1.
    if (op.op_ == ReduceOp::SUM) plan.op = ReduceOp::BOR;
  }
  if (integral && op.op_ == ReduceOp::AVG) {
    plan.op = ReduceOp::SUM;
    plan.divide = true;
  }
  TORCH_CHECK(HasDtype(plan.dtype) || c10::isComplexType(plan.dtype), "gloo: no reduction of ",
              dtype, "; convert to a dtype that has one, such as ",
              integral ? ScalarType::Long : ScalarType::Float);
  plan.is_native = plan.dtype == dtype && plan.op == op.op_;
  return plan;
}

}  // namespace ddp::backends::gloo
