// All-gather of one tensor per rank, in one message. For values whose shapes differ by rank, and
// for statuses instead of exceptions: ddp/gather/gather.h.
//
//   std::vector<at::Tensor> all = AllGather(*group, mine);  // all[r] is rank r's
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Collective, and blocks. `mine` must have the same shape and dtype on all ranks and be on a device
// that the group has a backend for. Returns new tensors in rank order, on the same device. Throws
// the backend's exceptions. Thread-compatible.
std::vector<at::Tensor> AllGather(c10d::ProcessGroup& group, const at::Tensor& mine);

}  // namespace ddp
