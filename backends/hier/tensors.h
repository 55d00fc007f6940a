// Converts tensors of any shape and strides to the contiguous 1-d tensors of the algorithms.
//
//   Flat flat = Flat::Of(tensor);
//   …                                // read and write flat.tensor()
//   flat.CopyBack();
#pragma once

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace ddp::backends::hier {

// `whole`, which is 1-d, cut into `count` views of the same size, which divides its own.
std::vector<at::Tensor> EqualParts(const at::Tensor& whole, int count);

// A contiguous 1-d view of a tensor or, if it is not contiguous, a copy. Thread-compatible.
class Flat {
 public:
  static Flat Of(const at::Tensor& tensor);
  // The tensor is only written: contents of a copy are undefined.
  static Flat ToFill(const at::Tensor& tensor);

  const at::Tensor& tensor() const { return flat_; }
  // Copies a copy to the original tensor; does nothing for a view.
  void CopyBack();

 private:
  Flat(at::Tensor original, at::Tensor flat)
      : original_(std::move(original)), flat_(std::move(flat)) {}
  at::Tensor original_, flat_;
};

}  // namespace ddp::backends::hier
