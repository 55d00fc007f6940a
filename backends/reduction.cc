#include "backends/reduction.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::backends {
namespace {

using shm::DType;

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

std::optional<shm::ReduceOp> ToOp(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return shm::ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return shm::ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return shm::ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return shm::ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return shm::ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return shm::ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return shm::ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return shm::ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return shm::ReduceOp::kPremulSum;
    case c10d::ReduceOp::UNUSED:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<shm::Reduction> ToReduction(const c10d::ReduceOp& op, c10::ScalarType dtype,
                                           int world_size) {
  const std::optional<DType> type = ToDType(dtype);
  const std::optional<shm::ReduceOp> reduce = ToOp(op);
  if (!type || !reduce) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensors of ", c10::toString(dtype), " are moved, but not reduced"));
  }
  shm::Reduction reduction{.dtype = *type, .op = *reduce};
  if (*reduce == shm::ReduceOp::kAvg) reduction.factor = world_size;
  if (*reduce == shm::ReduceOp::kPremulSum) {
    const auto* supplement =
        dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    if (supplement == nullptr) {
      return absl::InvalidArgumentError("PREMUL_SUM without a factor (c10d::makeNCCLPreMulSum)");
    }
    reduction.factor = supplement->tensor_factor.defined()
                           ? supplement->tensor_factor.item<double>()
                           : supplement->double_factor;
  }
  DDP_RETURN_IF_ERROR(shm::Check(reduction));
  return reduction;
}

}  // namespace ddp::backends
