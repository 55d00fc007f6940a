// Tensors of any strides as contiguous memory, in the order of their elements (row-major).
//
//   Staging staging;
//   Buffer buffer = staging.InOut(tensor);    // the tensor's own memory if it is contiguous
//   …                                         // read and write `buffer`
//   staging.CopyBack();                       // copies results to tensors that are not contiguous
//
// c10d's Gloo and NCCL backends send the memory of a dense tensor without regard to its strides,
// which gives wrong results if the strides differ between ranks.
#pragma once

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/common/buffer.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// Holds references to the tensors; the buffers are valid as long as this object. Thread-compatible.
class Staging {
 public:
  // Memory that is only read, only written, or both.
  Buffer In(const at::Tensor& tensor);
  Buffer Out(const at::Tensor& tensor);
  Buffer InOut(const at::Tensor& tensor);

  // The same for the input and the output of a reduction by `op`, in the dtype SummedAs(op, dtype);
  // inputs of a premul-sum are Premultiplied (reduction.h).
  Buffer In(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Buffer Out(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Buffer InOut(const at::Tensor& tensor, const c10d::ReduceOp& op);

  bool HasCopies() const { return !back_.empty(); }
  void CopyBack() const;

 private:
  Buffer Keep(at::Tensor memory);
  Buffer KeepFor(const at::Tensor& tensor, at::Tensor memory);

  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // to copy back: tensor, its memory here
};

}  // namespace ddp::backends
