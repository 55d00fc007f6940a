// What a collective moves where, in plain numbers: the definition that backends are checked
// against.
//
//   Plan plan = MakePlan(Op::kScatter, /*count=*/3, /*world_size=*/2, /*rank=*/1, /*root=*/0);
//   plan.inputs.empty() && plan.outputs == Outputs{{{.rank = 0, .input = 1, .offset = 0, .count =
//   3}}}
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
  std::vector<std::vector<Segment>> outputs;  // of each output tensor of this rank, end to end
  bool in_place = false;  // the inputs are the outputs; without outputs, their end is undefined
};

// `rank` and `root` count within the group that `world_size` counts. Messages are of `count`
// elements; of operations that take sizes per rank, message s -> d is of MessageSize elements, and
// coalesced ones move a second, slightly larger tensor as well.
Plan MakePlan(Op op, int64_t count, int world_size, int rank, int root);

// Elements that rank `source` sends to rank `target`: `count`, or by operation a size that differs
// by pair of ranks and is zero for some.
int64_t MessageSize(Op op, int64_t count, int source, int target);

// Elements of both tensors of a coalesced operation.
std::vector<int64_t> CoalescedSizes(int64_t count);

int64_t TotalCount(const std::vector<Segment>& output);

// Whether the rank whose plan this is cannot know its result before `peer` has taken part.
bool DependsOn(const Plan& plan, Op op, int rank, int peer);

}  // namespace ddp::backends::conformance
