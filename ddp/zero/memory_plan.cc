#include "ddp/zero/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "ddp/zero/bucket_schedule.h"
#include "ddp/zero/partition.h"

namespace ddp::zero {

MemoryPlan PlanMemory(absl::Span<const PlannedRange> ranges, const PlanOptions& options) {
  MemoryPlan plan;
  std::vector<int64_t> state(options.world_size);
  // The largest in bytes, and how many; by size of element and dtype: ranges of one dtype share
  // buckets.
  std::map<std::pair<int64_t, int>, std::pair<int64_t, int64_t>> blocks;
  std::vector<std::vector<size_t>> tensors_of;  // by bucket
  std::vector<int64_t> bytes;                   // by tensor
  for (const PlannedRange& range : ranges) {
    const int64_t elements = std::accumulate(range.numels.begin(), range.numels.end(), int64_t{0});
    if (options.stage == 0) {
      plan.parameters += elements * range.element_bytes;
      plan.gradients += elements * range.element_bytes;
      state[0] += elements * range.state_bytes;
      continue;
    }
    const bool reduces = options.stage == 2 && options.world_size > 1;
    const auto max_block = static_cast<int64_t>(options.bucket_cap_mb * 1024 * 1024);
    const auto divide = options.partition == "tensor" ? &Partition::ByTensor : &Partition::Flat;
    const Partition partition = divide(range.numels, range.element_bytes, options.world_size,
                                       options.stage == 2 ? std::max<int64_t>(1, max_block) : 0);
    plan.parameters += partition.storage_size() * range.element_bytes;
    plan.gradients += (reduces ? partition.shard_size() : elements) * range.element_bytes;
    for (int rank = 0; rank < options.world_size; ++rank) {
      state[rank] += partition.OwnedElements(rank) * range.state_bytes;
    }
    if (!reduces) continue;
    auto& [largest, count] = blocks[{range.element_bytes, range.dtype}];
    for (const Block& block : partition.reduce_blocks()) {
      largest = std::max(largest, block.part * options.world_size * range.element_bytes);
      ++count;
      tensors_of.emplace_back();
      for (const int tensor : TensorsIn(partition, block)) {
        tensors_of.back().push_back(bytes.size() + tensor);
      }
    }
    for (const int64_t numel : range.numels) bytes.push_back(numel * range.element_bytes);
  }
  for (const auto& [dtype, of_dtype] : blocks) {
    plan.buckets += of_dtype.first * std::min<int64_t>(2, of_dtype.second);
  }
  std::vector<int64_t> arrival = options.arrival;
  if (arrival.empty()) {
    for (size_t i = bytes.size(); i > 0; --i) arrival.push_back(static_cast<int64_t>(i) - 1);
  }
  const auto held_with = [&](const std::vector<size_t>& order) {
    std::vector<std::vector<size_t>> ordered;
    for (const size_t bucket : order) ordered.push_back(tensors_of[bucket]);
    return PeakOfHeldBytes(ordered, bytes, arrival);
  };
  plan.held = held_with(OrderByArrival(tensors_of, bytes.size(), arrival));
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const std::vector<size_t>& tensors : tensors_of) {
    places.emplace_back(tensors.empty() ? -1 : static_cast<int64_t>(tensors[0]), places.size());
  }
  plan.held_in_first_backward = held_with(OrderByRegistration(places));
  plan.state = *std::max_element(state.begin(), state.end());
  return plan;
}

}  // namespace ddp::zero
