// All-gather of one tensor per rank, in one message. For values whose shapes differ by rank, and
// for statuses instead of exceptions: ddp/gather/gather.h.
//
//   std::vector<at::Tensor> all = AllGather(*group, mine);  // all[r] is rank r's
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty_like.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Collective, and blocks. `mine` must have the same shape and dtype on all ranks and be on a device
// that the group has a backend for. Returns new tensors in rank order, on the same device. Throws
// the backend's exceptions. Thread-compatible.
inline std::vector<at::Tensor> AllGather(c10d::ProcessGroup& group, const at::Tensor& mine) {
  std::vector<at::Tensor> inputs = {mine};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int i = 0; i < group.getSize(); ++i) outputs[0].push_back(at::empty_like(mine));
  group.allgather(outputs, inputs)->wait();
  return outputs[0];
}

}  // namespace ddp
