#include "backends/mpi/checks.h"

#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"

namespace ddp::backends::mpi {

void CheckTensor(const char* title, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided, title,
              ": takes dense CPU tensors, not ", tensor.device(), ", ", tensor.layout());
}

void CheckSameType(const char* title, const at::Tensor& a, const at::Tensor& b) {
  CheckTensor(title, a);
  CheckTensor(title, b);
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), title, ": tensors of ", a.scalar_type(), " and ",
              b.scalar_type(), " cannot take part in one operation");
}

const at::Tensor& Single(const char* title, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, title, ": takes one tensor, not ", tensors.size());
  CheckTensor(title, tensors[0]);
  return tensors[0];
}

std::string DescribeTensors(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return "";
  std::string text =
      absl::StrCat(" of ", tensors[0].numel(), " x ", c10::toString(tensors[0].scalar_type()));
  if (tensors.size() > 1) absl::StrAppend(&text, " and ", tensors.size() - 1, " more tensors");
  return text;
}

}  // namespace ddp::backends::mpi
