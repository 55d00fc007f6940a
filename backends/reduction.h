// c10d's reductions as the kernels take them.
#pragma once

#include "absl/status/statusor.h"
#include "backends/shm/reduce_kernels.h"
#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace ddp::backends {

// InvalidArgument for a dtype that is not reduced (float8, quantised), and for what shm::Check
// refuses: bitwise operations on floating point, and the like.
absl::StatusOr<shm::Reduction> ToReduction(const c10d::ReduceOp& op, c10::ScalarType dtype,
                                           int world_size);

}  // namespace ddp::backends
