#include "backends/conformance/plan.h"

#include <numeric>

namespace ddp::backends::conformance {
namespace {

// Outputs of `counts` elements, of which rank r gets the r-th part of each input, reduced.
Plan ReduceScatterParts(const std::vector<int64_t>& counts, int world_size, int rank) {
  Plan plan;
  for (size_t i = 0; i < counts.size(); ++i) {
    plan.inputs.push_back(counts[i] * world_size);
    plan.outputs.push_back(
        {{Segment::kAllRanks, static_cast<int>(i), rank * counts[i], counts[i]}});
  }
  return plan;
}

// Inputs of `counts` elements, each gathered into one output.
Plan GatherIntoTensors(const std::vector<int64_t>& counts, int world_size) {
  Plan plan;
  plan.inputs = counts;
  for (size_t i = 0; i < counts.size(); ++i) {
    std::vector<Segment> output;
    for (int peer = 0; peer < world_size; ++peer) {
      output.push_back({peer, static_cast<int>(i), 0, counts[i]});
    }
    plan.outputs.push_back(output);
  }
  return plan;
}

Plan Alltoall(Op op, int64_t count, int world_size, int rank) {
  Plan plan;
  for (int peer = 0; peer < world_size; ++peer) {
    plan.inputs.push_back(MessageSize(op, count, rank, peer));
    plan.outputs.push_back({{peer, rank, 0, MessageSize(op, count, peer, rank)}});
  }
  return plan;
}

// As Alltoall, with all of a rank's messages end to end in one tensor.
Plan AlltoallBase(Op op, int64_t count, int world_size, int rank) {
  Plan plan;
  std::vector<Segment> output;
  int64_t input = 0;
  for (int peer = 0; peer < world_size; ++peer) {
    input += MessageSize(op, count, rank, peer);
    int64_t offset = 0;
    for (int before = 0; before < rank; ++before) offset += MessageSize(op, count, peer, before);
    output.push_back({peer, 0, offset, MessageSize(op, count, peer, rank)});
  }
  plan.inputs = {input};
  plan.outputs = {output};
  return plan;
}

}  // namespace

int64_t MessageSize(Op op, int64_t count, int source, int target) {
  switch (op) {
    case Op::kAllgatherUnequal:
      return source == 1 ? 0 : count + source;
    case Op::kAlltoall:
    case Op::kAlltoallBaseUnequal:
      return (source + target) % 3 == 1 ? 0 : count + 2 * source + target;
    default:
      return count;
  }
}

std::vector<int64_t> CoalescedSizes(int64_t count) { return {count, count + 2}; }

int64_t TotalCount(const std::vector<Segment>& output) {
  return std::accumulate(output.begin(), output.end(), int64_t{0},
                         [](int64_t sum, const Segment& segment) { return sum + segment.count; });
}

Plan MakePlan(Op op, int64_t count, int world_size, int rank, int root) {
  Plan plan;
  switch (op) {
    case Op::kAllreduce:
      return {{count}, {{{Segment::kAllRanks, 0, 0, count}}}, /*in_place=*/true};
    case Op::kAllreduceCoalesced: {
      plan.inputs = CoalescedSizes(count);
      for (int i = 0; i < static_cast<int>(plan.inputs.size()); ++i) {
        plan.outputs.push_back({{Segment::kAllRanks, i, 0, plan.inputs[i]}});
      }
      plan.in_place = true;
      return plan;
    }
    case Op::kReduce:
      plan.inputs = {count};
      if (rank == root) plan.outputs = {{{Segment::kAllRanks, 0, 0, count}}};
      plan.in_place = true;
      return plan;
    case Op::kReduceScatter:
      plan.inputs.assign(world_size, count);
      plan.outputs = {{{Segment::kAllRanks, rank, 0, count}}};
      return plan;
    case Op::kReduceScatterBase:
      return ReduceScatterParts({count}, world_size, rank);
    case Op::kReduceScatterCoalesced:
      return ReduceScatterParts(CoalescedSizes(count), world_size, rank);
    case Op::kAllgather:
    case Op::kAllgatherUnequal:
      plan.inputs = {MessageSize(op, count, rank, 0)};
      for (int peer = 0; peer < world_size; ++peer) {
        plan.outputs.push_back({{peer, 0, 0, MessageSize(op, count, peer, rank)}});
      }
      return plan;
    case Op::kAllgatherBase:
      return GatherIntoTensors({count}, world_size);
    case Op::kAllgatherIntoTensorCoalesced:
      return GatherIntoTensors(CoalescedSizes(count), world_size);
    case Op::kAllgatherCoalesced: {
      plan.inputs = CoalescedSizes(count);
      for (int peer = 0; peer < world_size; ++peer) {
        for (int i = 0; i < static_cast<int>(plan.inputs.size()); ++i) {
          plan.outputs.push_back({{peer, i, 0, plan.inputs[i]}});
        }
      }
      return plan;
    }
    case Op::kBroadcast:
      return {{count}, {{{root, 0, 0, count}}}, /*in_place=*/true};
    case Op::kGather:
      plan.inputs = {count};
      if (rank != root) return plan;
      for (int peer = 0; peer < world_size; ++peer) plan.outputs.push_back({{peer, 0, 0, count}});
      return plan;
    case Op::kScatter:
      if (rank == root) plan.inputs.assign(world_size, count);
      plan.outputs = {{{root, rank, 0, count}}};
      return plan;
    case Op::kAlltoall:
      return Alltoall(op, count, world_size, rank);
    case Op::kAlltoallBase:
    case Op::kAlltoallBaseUnequal:
      return AlltoallBase(op, count, world_size, rank);
    case Op::kSendRecv: {
      // Two messages around the ring, that differ in size.
      const int previous = (rank + world_size - 1) % world_size;
      plan.inputs = {count, count + 1};
      plan.outputs = {{{previous, 0, 0, count}}, {{previous, 1, 0, count + 1}}};
      return plan;
    }
    case Op::kRecvAnysource:
      // Outputs are in the order of ranks here, whatever the order of arrival.
      if (rank != root) {
        plan.inputs = {count};
        return plan;
      }
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer != root) plan.outputs.push_back({{peer, 0, 0, count}});
      }
      return plan;
    case Op::kBarrier:
    case Op::kMonitoredBarrier:
      return plan;
  }
  return plan;
}

bool DependsOn(const Plan& plan, Op op, int rank, int peer) {
  if (op == Op::kBarrier || op == Op::kMonitoredBarrier) return true;
  for (const std::vector<Segment>& output : plan.outputs) {
    for (const Segment& segment : output) {
      if (segment.rank == peer && peer != rank && segment.count > 0) return true;
      if (segment.rank == Segment::kAllRanks && segment.count > 0) return true;
    }
  }
  return false;
}

}  // namespace ddp::backends::conformance
