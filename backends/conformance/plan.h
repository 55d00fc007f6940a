// Which elements a collective moves where: the definition that backends are checked against.
//
//   Plan plan = MakePlan(Op::kScatter, /*count=*/3, /*world_size=*/2, /*rank=*/1, /*root=*/0);
//   plan.inputs.empty() &&
//       plan.outputs == Outputs{{{.rank = 0, .input = 1, .offset = 0, .count = 3}}}
#pragma once

#include <cstdint>
#include <vector>

#include "backends/conformance/case.h"

namespace ddp::backends::conformance {

// A run of elements of an output: copied from one rank's input, or reduced over all ranks' inputs.
struct Segment {
  static constexpr int kAllRanks = -1;

  int rank = kAllRanks;
  int input = 0;       // which of the source rank's inputs
  int64_t offset = 0;  // where in that input
  int64_t count = 0;

  bool operator==(const Segment&) const = default;
};

struct Plan {
  std::vector<int64_t> inputs;                // elements of each input tensor of this rank
  std::vector<std::vector<Segment>> outputs;  // of each output tensor, consecutive segments
  // The inputs are also the outputs; if `outputs` is empty, their final contents are undefined.
  bool in_place = false;
};

// `rank` and `root` are ranks of the group, which has `world_size` ranks. A message has `count`
// elements or, in operations with sizes per rank, MessageSize elements. Coalesced operations also
// move a second, slightly larger tensor.
Plan MakePlan(Op op, int64_t count, int world_size, int rank, int root);

// Elements that rank `source` sends to rank `target`: `count` or, in operations with sizes per
// rank, a size that depends on both ranks and is 0 for some pairs.
int64_t MessageSize(Op op, int64_t count, int source, int target);

// Elements of both tensors of a coalesced operation.
std::vector<int64_t> CoalescedSizes(int64_t count);

int64_t TotalCount(const std::vector<Segment>& output);

// Whether the rank whose plan this is cannot know its result before `peer` has taken part.
bool DependsOn(const Plan& plan, Op op, int rank, int peer);

}  // namespace ddp::backends::conformance
