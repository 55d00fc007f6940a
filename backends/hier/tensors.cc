#include "backends/hier/tensors.h"

#include "ATen/ops/empty.h"

namespace ddp::backends::hier {

void CheckTensors(absl::string_view op, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu(),
                "hier: ", std::string(op), " takes dense tensors on the CPU");
  }
}

void CheckOne(absl::string_view op, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "hier: ", std::string(op), " takes one tensor, not ",
              tensors.size());
  CheckTensors(op, tensors);
}

void CheckRoot(absl::string_view op, int64_t root, int size) {
  TORCH_CHECK(root >= 0 && root < size, "hier: ", std::string(op), ": no rank ", root,
              " in a group of ", size);
}

void CheckSame(absl::string_view op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.numel() == b.numel() && a.scalar_type() == b.scalar_type(),
              "hier: ", std::string(op), ": ", b.numel(), " elements of ", b.scalar_type(),
              " against ", a.numel(), " of ", a.scalar_type());
}

std::vector<at::Tensor> Slices(absl::string_view op, const at::Tensor& whole,
                               const at::Tensor& part, int count) {
  TORCH_CHECK(whole.numel() == part.numel() * count, "hier: ", std::string(op), ": ", whole.numel(),
              " elements are not ", count, " times ", part.numel());
  std::vector<at::Tensor> slices;
  for (int i = 0; i < count; ++i) slices.push_back(whole.narrow(0, i * part.numel(), part.numel()));
  return slices;
}

Flat Flat::Of(const at::Tensor& tensor) { return Flat(tensor, tensor.contiguous().view(-1)); }

Flat Flat::ToFill(const at::Tensor& tensor) {
  return Flat(tensor, tensor.is_contiguous() ? tensor.view(-1)
                                             : at::empty({tensor.numel()}, tensor.options()));
}

void Flat::CopyBack() {
  if (!original_.is_contiguous()) original_.copy_(flat_.view(original_.sizes()));
}

}  // namespace ddp::backends::hier
