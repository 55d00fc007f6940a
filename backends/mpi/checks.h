// What c10d's operations ask of their tensors. Stops the caller by a c10::Error, as c10d does.
#pragma once

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/util/Exception.h"

// In a member of a c10d::Backend: throws unless `condition`, with what is wrong in the operation
// `title`, and on which rank.
#define DDP_MPI_CHECK(condition, title, ...) \
  TORCH_CHECK(condition, title, " on rank ", getRank(), " of ", getSize(), ": ", __VA_ARGS__)

namespace ddp::backends::mpi {

// Dense and on the CPU.
void CheckTensor(const char* title, const at::Tensor& tensor);
// Both of them, and of one dtype.
void CheckSameType(const char* title, const at::Tensor& a, const at::Tensor& b);
// The only one of `tensors`, checked.
const at::Tensor& Single(const char* title, const std::vector<at::Tensor>& tensors);

// " of 1000 x Float and 2 more tensors"; nothing for none.
std::string DescribeTensors(const std::vector<at::Tensor>& tensors);

}  // namespace ddp::backends::mpi
