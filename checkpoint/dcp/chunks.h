// Checks that the boxes in which a tensor was stored make up the whole. Free of torch.
//
//   DDP_RETURN_IF_ERROR(CheckChunks({6, 4}, {{{0, 0}, {3, 4}}, {{3, 0}, {3, 4}}}));
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint::dcp {

// OK if the boxes hold each element of a tensor of this shape exactly once. DataLoss names a box
// that reaches outside, two boxes that overlap, or the number of elements that are in none. Boxes
// without elements count for nothing. The time is bounded also for hostile boxes. Thread-safe.
absl::Status CheckChunks(const std::vector<int64_t>& shape, absl::Span<const Box> boxes);

// Returns what two boxes of one tensor have in common; nullopt if that is no element. A tensor
// without dimensions has one element, which is in each of its boxes. Thread-safe.
std::optional<Box> Intersection(const Box& a, const Box& b);

}  // namespace ddp::checkpoint::dcp
