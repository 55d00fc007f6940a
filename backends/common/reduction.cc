#include "backends/common/reduction.h"

#include <optional>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends {
namespace {

std::optional<ReduceOp> ToOp(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::UNUSED:
      return std::nullopt;
  }
  return std::nullopt;
}

const c10d::PreMulSumSupplement* Factor(const c10d::ReduceOp& op) {
  return dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
}

}  // namespace

std::optional<DType> ToDType(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return DType::kBool;
    case c10::ScalarType::Byte:
      return DType::kUInt8;
    case c10::ScalarType::Char:
      return DType::kInt8;
    case c10::ScalarType::UInt16:
      return DType::kUInt16;
    case c10::ScalarType::Short:
      return DType::kInt16;
    case c10::ScalarType::UInt32:
      return DType::kUInt32;
    case c10::ScalarType::Int:
      return DType::kInt32;
    case c10::ScalarType::UInt64:
      return DType::kUInt64;
    case c10::ScalarType::Long:
      return DType::kInt64;
    case c10::ScalarType::Half:
      return DType::kHalf;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Float:
      return DType::kFloat;
    case c10::ScalarType::Double:
      return DType::kDouble;
    case c10::ScalarType::ComplexFloat:
      return DType::kComplexFloat;
    case c10::ScalarType::ComplexDouble:
      return DType::kComplexDouble;
    default:
      return std::nullopt;
  }
}

absl::StatusOr<Reduction> ToReduction(const c10d::ReduceOp& op, c10::ScalarType dtype,
                                      int world_size) {
  const std::optional<DType> type = ToDType(SummedAs(op, dtype));
  const std::optional<ReduceOp> reduce = ToOp(op);
  if (!type || !reduce) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensors of ", c10::toString(dtype), " are moved, but not reduced"));
  }
  Reduction reduction{.dtype = *type, .op = *reduce};
  if (*reduce == ReduceOp::kAvg) reduction.factor = world_size;
  if (IsPremulSum(op)) {
    if (Factor(op) == nullptr) {
      return absl::InvalidArgumentError("PREMUL_SUM without a factor (c10d::makePreMulSum)");
    }
    if (c10::isIntegralType(dtype, /*includeBool=*/true)) {
      return absl::InvalidArgumentError(
          absl::StrCat("PREMUL_SUM takes floating point or complex numbers, not ",
                       c10::toString(dtype), ": the factor is a real number"));
    }
  }
  DDP_RETURN_IF_ERROR(Check(reduction));
  return reduction;
}

c10::ScalarType SummedAs(const c10d::ReduceOp& op, c10::ScalarType dtype) {
  const bool is_16_bit = dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
  return is_16_bit && IsPremulSum(op) ? c10::ScalarType::Float : dtype;
}

at::Tensor Premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const c10::NoGradGuard no_grad;
  const c10d::PreMulSumSupplement& factor = *Factor(op);
  at::Tensor products =
      at::empty(tensor.sizes(), tensor.options().dtype(SummedAs(op, tensor.scalar_type())));
  products.copy_(tensor);
  return products.mul_(factor.tensor_factor.defined() ? factor.tensor_factor.item()
                                                      : c10::Scalar(factor.double_factor));
}

}  // namespace ddp::backends
