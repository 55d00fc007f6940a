#include "backends/common/staging.h"

#include "ATen/ops/empty.h"
#include "backends/common/reduction.h"
#include "c10/core/GradMode.h"

namespace ddp::backends {

Buffer Staging::Keep(at::Tensor memory) {
  kept_.push_back(std::move(memory));
  return {static_cast<std::byte*>(kept_.back().data_ptr()), kept_.back().nbytes()};
}

Buffer Staging::KeepFor(const at::Tensor& tensor, at::Tensor memory) {
  back_.emplace_back(tensor, memory);
  return Keep(std::move(memory));
}

Buffer Staging::In(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return Keep(tensor);
  const c10::NoGradGuard no_grad;
  return Keep(tensor.contiguous());
}

Buffer Staging::Out(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return Keep(tensor);
  return KeepFor(tensor, at::empty(tensor.sizes(), tensor.options()));
}

Buffer Staging::InOut(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return Keep(tensor);
  const c10::NoGradGuard no_grad;
  return KeepFor(tensor, tensor.contiguous());
}

Buffer Staging::In(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return IsPremulSum(op) ? Keep(Premultiplied(tensor, op)) : In(tensor);
}

Buffer Staging::Out(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const c10::ScalarType dtype = SummedAs(op, tensor.scalar_type());
  if (dtype == tensor.scalar_type()) return Out(tensor);
  return KeepFor(tensor, at::empty(tensor.sizes(), tensor.options().dtype(dtype)));
}

Buffer Staging::InOut(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return IsPremulSum(op) ? KeepFor(tensor, Premultiplied(tensor, op)) : InOut(tensor);
}

void Staging::CopyBack() const {
  const c10::NoGradGuard no_grad;
  for (const auto& [tensor, memory] : back_) tensor.copy_(memory);
}

}  // namespace ddp::backends
