// Random sequences of collectives from a seed, the same on all ranks, checked against the
// reference.
//
//   FuzzOptions options{.seed = 7, .steps = 1000};
//   absl::Status status = Fuzz(*groups, options);
//
// Collectives of all kinds, dtypes and sizes run one after the other and at the same time, on
// three interleaved groups; each rank waits for them in an order of its own.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "backends/conformance/groups.h"

namespace ddp::backends::conformance {

struct FuzzOptions {
  uint64_t seed = 1;
  int64_t steps = 100;
  int64_t max_count = int64_t{1} << 15;  // elements of one message
  int max_in_flight = 8;
};

// Collective. The message of an error says seed, step, case and rank; DataLoss means a wrong
// result.
absl::Status Fuzz(Groups& groups, const FuzzOptions& options);

// The case of step `step`, chosen among those that the backend must support at this world size.
Case FuzzCase(const Traits& traits, int world_size, uint64_t seed, int64_t step, int64_t max_count);

}  // namespace ddp::backends::conformance
