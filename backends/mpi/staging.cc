#include "backends/mpi/staging.h"

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"

namespace ddp::backends::mpi {

Buffer Staging::Keep(at::Tensor memory) {
  kept_.push_back(std::move(memory));
  return {static_cast<std::byte*>(kept_.back().data_ptr()), kept_.back().nbytes()};
}

Buffer Staging::Input(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return Keep(tensor.contiguous());
}

Buffer Staging::Output(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return Keep(tensor);
  const at::NoGradGuard no_grad;
  back_.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
  return Keep(back_.back().second);
}

Buffer Staging::InOut(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return Keep(tensor);
  const at::NoGradGuard no_grad;
  back_.emplace_back(tensor, tensor.contiguous());
  return Keep(back_.back().second);
}

void Staging::CopyBack() const {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, memory] : back_) tensor.copy_(memory);
}

}  // namespace ddp::backends::mpi
