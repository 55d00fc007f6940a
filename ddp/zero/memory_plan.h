// Computes how much memory a rank needs for parameters, gradients, optimizer state and buckets,
// before anything is allocated. Works without torch.
//
//   const MemoryPlan plan = PlanMemory({{.numels = sizes, .state_bytes = 8}}, {.world_size = 8,
//                                                                             .stage = 2});
//   plan.total();
//
// With P parameters of w bytes, an optimizer that keeps k bytes of state per parameter, and N
// ranks (ZeRO, arXiv:1910.02054, section 3 and figure 1, with w = 2 and k = 12 for Adam in mixed
// precision):
//
//   stage   parameters   gradients   state     buckets
//   0       w P          w P         k P       in the gradients, which are views of them
//   1       w P          w P         k P / N   as stage 0
//   2       w P          w P / N     k P / N   two of bucket_cap_mb for each dtype
//
// and the padding of the partition. Not included: activations and, in stage 2, the one gradient
// that autograd has just computed. In stage 2, gradients that do not arrive in the order of the
// parameters, from the last to the first or the other way, wait for their buckets: with `arrival`
// these are included; w P at most.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace ddp::zero {

// Parameters of one group, dtype and device.
struct PlannedRange {
  std::vector<int64_t> numels;
  int64_t element_bytes = 4;
  // The bytes per element of all entries of the optimizer's state, and 4 for fp32 copies of fp16
  // and bf16.
  int64_t state_bytes = 0;
  // Any number: ranges of other dtypes with elements of the same size, which share no buckets, have
  // another one.
  int dtype = 0;
};

struct PlanOptions {
  int world_size = 1;
  int stage = 0;
  std::string partition = "flat";
  double bucket_cap_mb = 25;
  // Stage 2: the order in which gradients arrive, as numbers through all ranges, after the first
  // backward. Empty: from the last to the first.
  std::vector<int64_t> arrival = {};
};

// The memory, in bytes, of the rank that needs most.
struct MemoryPlan {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t state = 0;
  int64_t buckets = 0;
  int64_t held = 0;  // whole gradients that wait for their buckets
  // The same in the first backward, which reduces buckets from the last parameters to the first.
  // The optimizer has no state yet then; a resumed run, which has, knows the order from the start.
  int64_t held_in_first_backward = 0;

  // After the first step.
  int64_t total() const { return parameters + gradients + state + buckets + held; }
};

MemoryPlan PlanMemory(absl::Span<const PlannedRange> ranges, const PlanOptions& options);

}  // namespace ddp::zero
