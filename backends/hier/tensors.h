// Tensors as callers have them, and as the algorithms take them: flat.
#pragma once

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace ddp::backends::hier {

// `whole`, which is 1-d, cut into `count` views of the same size, which divides its own.
std::vector<at::Tensor> EqualParts(const at::Tensor& whole, int count);

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
