// Which tensors GlooBackend prepares for ProcessGroupGloo, and how.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/gloo/reduction_plan.h"

namespace ddp::backends::gloo {

// Sparse tensors are passed to ProcessGroupGloo (but see IsSparse).
inline bool IsOurs(const at::Tensor& tensor) { return tensor.layout() == c10::kStrided; }

// Tensors of other devices go through copies in the CPU's memory.
inline bool IsOnDevice(const at::Tensor& tensor) {
  return IsOurs(tensor) && !tensor.device().is_cpu();
}

inline bool HasGaps(const at::Tensor& tensor) {
  return IsOurs(tensor) && !tensor.is_non_overlapping_and_dense();
}

inline bool AnyHasGaps(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), HasGaps);
}

// Whether ProcessGroupGloo cannot take the tensor itself.
inline bool IsForeign(const at::Tensor& tensor) {
  return IsOurs(tensor) && (IsOnDevice(tensor) || !HasDtype(tensor.scalar_type()));
}

inline bool AnyIsForeign(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), IsForeign);
}

// Whether ProcessGroupGloo can reduce the tensors themselves.
inline bool CanReduce(const ReductionPlan& plan, const std::vector<at::Tensor>& tensors) {
  return plan.is_native && !AnyHasGaps(tensors) &&
         std::none_of(tensors.begin(), tensors.end(), IsOnDevice);
}

// Tensors of any dtype and device as byte tensors of the CPU, in the order of their elements.
class Bytes {
 public:
  // The caller's memory if `tensor` is contiguous and the CPU's, otherwise a copy, for which the
  // calling thread waits.
  at::Tensor Of(const at::Tensor& tensor) {
    const at::Tensor contiguous = tensor.cpu().contiguous();
    if (!contiguous.is_same(tensor)) copies_.emplace_back(tensor, contiguous);
    // A single element is contiguous with any stride, which view() does not accept.
    return contiguous.as_strided({contiguous.numel()}, {1}).view(at::kByte);
  }

  std::vector<at::Tensor> Of(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> bytes;
    for (const at::Tensor& tensor : tensors) bytes.push_back(Of(tensor));
    return bytes;
  }

  std::vector<std::vector<at::Tensor>> Of(const std::vector<std::vector<at::Tensor>>& lists) {
    std::vector<std::vector<at::Tensor>> bytes;
    for (const std::vector<at::Tensor>& list : lists) bytes.push_back(Of(list));
    return bytes;
  }

  // Copies received data to the caller's tensors, and waits until it is there.
  void CopyBack() const {
    for (const auto& [tensor, copy] : copies_) tensor.copy_(copy);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// Copies what Gloo has reduced to the caller's tensor.
inline void Finish(const ReductionPlan& plan, int world_size, at::Tensor prepared,
                   const at::Tensor& tensor) {
  if (plan.divide) prepared.div_(world_size, "trunc");
  if (!prepared.is_same(tensor)) tensor.copy_(prepared);
}

}  // namespace ddp::backends::gloo
