#include "backends/shm/convert.h"

#include <string>

#include "c10/util/Exception.h"

namespace ddp::backends::shm {
namespace {

DType ToDType(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    case at::kDouble:
      return DType::kDouble;
    case at::kComplexFloat:
      return DType::kComplexFloat;
    case at::kComplexDouble:
      return DType::kComplexDouble;
    default:
      TORCH_CHECK(false, "shm: ", dtype, " tensors can be moved, but not reduced");
  }
}

ReduceOp ToOp(c10d::ReduceOp::RedOpType op) {
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
      return ReduceOp::kPremulSum;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  TORCH_CHECK(false, "shm: reduce op number ", static_cast<int>(op), " is none of c10d's");
}

}  // namespace

Reduction ReductionFor(const c10d::ReduceOp& op, at::ScalarType dtype, int world_size) {
  Reduction reduction{ToDType(dtype), ToOp(op.op_), 1};
  if (reduction.op == ReduceOp::kAvg) reduction.factor = world_size;
  if (reduction.op == ReduceOp::kPremulSum) {
    const auto* supplement =
        dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(supplement != nullptr, "shm: a PREMUL_SUM without its factor");
    reduction.factor = supplement->tensor_factor.defined()
                           ? supplement->tensor_factor.item().toDouble()
                           : supplement->double_factor;
  }
  const absl::Status possible = Check(reduction);
  TORCH_CHECK(possible.ok(), "shm: ", std::string(possible.message()));
  return reduction;
}

void CheckTensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.defined(), "shm: ", what, ": a tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, "shm: ", what,
              ": tensors must be dense, and this one is ", tensor.layout());
  TORCH_CHECK(tensor.device().is_cpu(), "shm: ", what, ": serves CPU tensors, not ",
              tensor.device(), "; bind another backend to that device (cpu:shm,cuda:nccl)");
}

const at::Tensor& OnlyTensor(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "shm: ", what, ": one tensor per call, not ", tensors.size());
  CheckTensor(tensors[0], what);
  return tensors[0];
}

}  // namespace ddp::backends::shm
