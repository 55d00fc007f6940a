// One tensor of every rank, on every rank.
//
//   std::vector<at::Tensor> all = AllGather(*group, mine);  // all[r] is rank r's
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {

// Collective. `mine` has the same shape and dtype on all ranks, and lies on a device that the group
// serves; so do the results, in rank order. Throws what the backend throws.
std::vector<at::Tensor> AllGather(c10d::ProcessGroup& group, const at::Tensor& mine);

}  // namespace ddp
