// The reference: what is in each rank's tensors, and what must come out. Plain C++, no backend and
// no tensor.
//
//   Values values(c, group_size, salt);
//   std::vector<uint8_t> bytes = values.Input(rank, /*input=*/0, /*offset=*/0, count);
//   absl::Status status = values.Compare(plan.outputs[0], actual, Exactness::kBits);
//
// An element depends on salt, rank, input and position, each through a hash: data of another rank,
// from another place, of another call or not moved at all shows as a difference.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "backends/conformance/case.h"
#include "backends/conformance/plan.h"

namespace ddp::backends::conformance {

// How close to the reference a reduction of floating-point numbers must come. Whatever else is
// compared must be equal.
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

  // Compares an output's bytes with Expected(output), a block at a time: no more memory, however
  // large it is. DataLoss names the first element that differs, both values, and how many differ.
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
