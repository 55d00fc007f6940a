// Tensors as algorithms take them: one block of memory each, in the order of their elements.
//
//   Staging staging;
//   Buffer buffer = staging.InOut(tensor);    // the tensor's own memory where it is contiguous
//   …                                         // `buffer` is read and written
//   staging.CopyBack();                       // what was not in the tensor's own memory
//
// c10d's Gloo and NCCL send the memory of a dense tensor as it lies, which is the same wherever all
// ranks' tensors have the same strides, and garbage elsewhere.
#pragma once

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/common/buffer.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// Keeps the tensors. Thread-compatible.
class Staging {
 public:
  Buffer In(const at::Tensor& tensor);
  Buffer Out(const at::Tensor& tensor);
  Buffer InOut(const at::Tensor& tensor);

  // The same for what `op` reduces, and for its result, in the dtype that ToReduction says: what
  // goes in has been Premultiplied (reduction.h).
  Buffer In(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Buffer Out(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Buffer InOut(const at::Tensor& tensor, const c10d::ReduceOp& op);

  bool HasCopies() const { return !back_.empty(); }
  void CopyBack() const;

 private:
  Buffer Keep(at::Tensor memory);
  Buffer KeepFor(const at::Tensor& tensor, at::Tensor memory);

  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // tensor, memory
};

}  // namespace ddp::backends
