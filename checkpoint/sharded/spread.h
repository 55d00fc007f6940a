// Which rank writes what of tensors that all ranks have. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpoint/parts.h"

namespace ddp::checkpoint::sharded {

struct ReplicatedTensor {
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  std::vector<int> holders;  // the ranks that have it, ascending; not empty
};

// Rows of a tensor, that is a box that is whole but for the first dimension; of a tensor that is
// not cut, all of it.
struct Share {
  size_t tensor = 0;
  Box box;
};

// Minimum size of a tensor that is cut into rows, one box for each rank.
inline constexpr uint64_t kCutFrom = 8 << 20;

// The shares of each rank, in the order of `tensors`. `loads`: bytes by rank that the ranks write
// besides. The same on every rank. Large tensors are cut; of the others, the largest first, each
// goes to the rank that writes least. Thread-safe.
std::vector<std::vector<Share>> Spread(const std::vector<ReplicatedTensor>& tensors,
                                       std::vector<uint64_t> loads);

}  // namespace ddp::checkpoint::sharded
