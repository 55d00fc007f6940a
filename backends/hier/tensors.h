// Tensors as callers have them, and as the algorithms take them: flat.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace ddp::backends::hier {

// Each throws c10::Error that starts with "hier: `op`".
void CheckTensors(absl::string_view op, const std::vector<at::Tensor>& tensors);  // dense, on CPU
void CheckOne(absl::string_view op, const std::vector<at::Tensor>& tensors);
void CheckRoot(absl::string_view op, int64_t root, int size);
// Of one dtype and number of elements.
void CheckSame(absl::string_view op, const at::Tensor& a, const at::Tensor& b);

// The `count` equal parts of `whole`, which is flat, one after the other; each as large as `part`.
std::vector<at::Tensor> Slices(absl::string_view op, const at::Tensor& whole,
                               const at::Tensor& part, int count);

// A contiguous 1-d view of a tensor, or, where its strides allow none, a copy.
class Flat {
 public:
  static Flat Of(const at::Tensor& tensor);
  // Does not copy what is there.
  static Flat ToFill(const at::Tensor& tensor);

  const at::Tensor& tensor() const { return flat_; }
  // Writes a copy back; nothing to do for a view.
  void CopyBack();

 private:
  Flat(at::Tensor original, at::Tensor flat)
      : original_(std::move(original)), flat_(std::move(flat)) {}
  at::Tensor original_, flat_;
};

}  // namespace ddp::backends::hier
