#include "backends/hier/tensors.h"

#include "ATen/ops/empty.h"

namespace ddp::backends::hier {

std::vector<at::Tensor> EqualParts(const at::Tensor& whole, int count) {
  const int64_t size = whole.numel() / count;
  std::vector<at::Tensor> parts;
  for (int i = 0; i < count; ++i) parts.push_back(whole.narrow(0, i * size, size));
  return parts;
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
