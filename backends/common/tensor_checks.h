// Checks of the arguments of a c10d operation, before it starts, locally on each rank.
//
//   const CallName call{"shm:broadcast", rank, world_size};
//   const at::Tensor& tensor = CheckSingleTensor(call, tensors);
//   CheckRank(call, "root", options.rootRank);
//
// Each function throws c10::Error, as c10d's own backends do for wrong arguments, with a message of
// one form: the call, what was given, what is required. Backends shm, hier and mpi use the same
// form for their own checks:
//
//   TORCH_CHECK(tag >= 0, call, ": tag ", tag, " given; tags from 0 are required");
//   // "shm:send on rank 1 of 4: tag -1 given; tags from 0 are required"
//
// Thread-safe: no state. Not collective.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "ATen/core/Tensor.h"
#include "backends/common/reduce_kernels.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// The call that an error message is about.
struct CallName {
  const char* operation;  // "shm:broadcast"; a literal, borrowed
  int rank;               // of the caller
  int world_size;
};
std::ostream& operator<<(std::ostream& out, const CallName& call);

// A defined, dense (strided) tensor on the CPU, of any strides.
void CheckTensor(const CallName& call, const at::Tensor& tensor);
void CheckTensors(const CallName& call, const std::vector<at::Tensor>& tensors);

// Exactly one tensor, which passes CheckTensor and is returned.
const at::Tensor& CheckSingleTensor(const CallName& call, const std::vector<at::Tensor>& tensors);

// Both pass CheckTensor and have the same dtype.
void CheckSameDtype(const CallName& call, const at::Tensor& input, const at::Tensor& output);
// Both pass CheckSameDtype and have the same number of elements; shapes may differ.
void CheckSameSize(const CallName& call, const at::Tensor& input, const at::Tensor& output);
// Both have the same dtype, and `whole` has as many elements as one `part` per rank.
void CheckWholeOfParts(const CallName& call, const at::Tensor& whole, const at::Tensor& part);

// In these three, `what` is a plural for the message: "inputs", "lists of outputs".
// `given` must be the world size.
void CheckOnePerRank(const CallName& call, const char* what, size_t given);
// One list, which has one tensor for each rank. It is returned; its tensors are not checked.
const std::vector<at::Tensor>& CheckSingleList(const CallName& call, const char* what,
                                               const std::vector<std::vector<at::Tensor>>& lists);
// Rank `root` has one list, which passes CheckSingleList; all other ranks have none.
void CheckListOfRoot(const CallName& call, const char* what,
                     const std::vector<std::vector<at::Tensor>>& lists, int64_t root);
// There are as many inputs as outputs.
void CheckSameCount(const CallName& call, size_t inputs, size_t outputs);
// The part that a rank sends to itself: as many bytes sent as received.
void CheckOwnPart(const CallName& call, size_t sent_bytes, size_t received_bytes);

// `rank` must be a rank of the group; `what` is its role in the message: "root", "peer".
void CheckRank(const CallName& call, const char* what, int64_t rank);

// The reduction of tensors of `dtype` by `op` over the group; reduction.h says what is possible.
Reduction CheckReduction(const CallName& call, const c10d::ReduceOp& op, at::ScalarType dtype);

}  // namespace ddp::backends
