// Tensors as MPI takes them: one block of memory each, in the order of their elements.
//
//   auto staging = std::make_shared<Staging>();
//   Buffer buffer = staging->InOut(tensor);   // the tensor's own memory where it is contiguous
//   …                                         // MPI reads and writes `buffer`
//   staging->CopyBack();                      // what was not in the tensor's own memory
//
// c10d's Gloo and NCCL send the memory of a dense tensor as it lies, which is the same wherever all
// ranks' tensors have the same strides, and garbage elsewhere.
#pragma once

#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/mpi/requests.h"

namespace ddp::backends::mpi {

// Keeps the tensors. Thread-compatible.
class Staging {
 public:
  Buffer Input(const at::Tensor& tensor);
  Buffer Output(const at::Tensor& tensor);
  Buffer InOut(const at::Tensor& tensor);

  void CopyBack() const;

 private:
  Buffer Keep(at::Tensor memory);

  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // tensor, memory
};

}  // namespace ddp::backends::mpi
