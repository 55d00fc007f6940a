// From torch's types to those of the shared-memory engine.
#pragma once

#include "ATen/core/Tensor.h"
#include "backends/common/reduce_kernels.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends::shm {

// How `op` reduces elements of `dtype` over `world_size` ranks. Throws c10::Error, with what is
// possible, where it cannot.
Reduction ReductionFor(const c10d::ReduceOp& op, at::ScalarType dtype, int world_size);

// What `tensor` has, for the other ranks to compare; bytes where the kernels have no such dtype.
DType ElementOf(const at::Tensor& tensor);

// Throws c10::Error unless it is a dense CPU tensor.
void CheckTensor(const at::Tensor& tensor, const char* what);

// The one tensor of a list that has one, as c10d passes it. Throws c10::Error otherwise.
const at::Tensor& OnlyTensor(const std::vector<at::Tensor>& tensors, const char* what);

}  // namespace ddp::backends::shm
