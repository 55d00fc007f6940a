#include "backends/shm/convert.h"

#include <string>

#include "backends/common/reduction.h"
#include "c10/util/Exception.h"

namespace ddp::backends::shm {
Reduction ReductionFor(const c10d::ReduceOp& op, at::ScalarType dtype, int world_size) {
  const absl::StatusOr<Reduction> reduction = ToReduction(op, dtype, world_size);
  TORCH_CHECK(reduction.ok(), "shm: ", std::string(reduction.status().message()));
  return *reduction;
}

DType ElementOf(const at::Tensor& tensor) {
  return ToDType(tensor.scalar_type()).value_or(DType::kUInt8);
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
