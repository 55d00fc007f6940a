// The reference: each rank's input data and the expected results. Plain C++, without backend or
// tensors.
//
//   Values values(c, group_size, salt);
//   std::vector<uint8_t> bytes = values.Input(rank, /*input=*/0, /*offset=*/0, count);
//   absl::Status status = values.Compare(plan.outputs[0], actual, Exactness::kBits);
//
// An element is a hash of salt, rank, input and position, so data of another rank, position or
// call, and data that was not moved, is detected.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "backends/conformance/case.h"
#include "backends/conformance/plan.h"

namespace ddp::backends::conformance {

// Required accuracy of floating-point reductions. All other data must be equal.
enum class Exactness {
  kBits,      // added up in rank order, in at least fp32, and rounded once
  kRounding,  // added up in any order, rounded at each step
};

class Values {
 public:
  // `group_size` ranks take part in the collective; `salt` tells calls apart.
  Values(const Case& c, int group_size, uint64_t salt)
      : case_(c), group_size_(group_size), salt_(salt) {}

  // The bytes of elements [offset, offset + count) of one input of one rank.
  std::vector<uint8_t> Input(int rank, int input, int64_t offset, int64_t count) const;

  // The bytes of an output. fp16 and bf16 are reduced in fp32; integers wrap; avg of integers
  // rounds towards zero; of bool, sum is "or" and product is "and".
  std::vector<uint8_t> Expected(const std::vector<Segment>& output) const;

  // Compares an output's bytes with Expected(output), in blocks, so that memory use does not depend
  // on the size. DataLoss names the first element that differs, both values, and how many differ.
  // `exactness` is that of what is reduced.
  absl::Status Compare(const std::vector<Segment>& output, absl::Span<const uint8_t> actual,
                       Exactness exactness) const;

  // Elements that are made or compared at a time.
  static constexpr int64_t kBlock = int64_t{1} << 20;

 private:
  const Case case_;
  const int group_size_;
  const uint64_t salt_;
};

}  // namespace ddp::backends::conformance
