// Parts of a tensor, as shapes and index ranges: what a rank holds, what a reader asks for, and
// whether the parts of all ranks make up the whole. Free of torch.
//
//   Shard rows{.global_shape = {6, 4}, .part = Box{.offset = {2, 0}, .sizes = {2, 4}}};
//   Shard range{.global_shape = {6, 4}, .part = FlatRange{.begin = 5, .end = 13}};
//   DDP_RETURN_IF_ERROR(CheckLocal(range, {8}));   // the rank's tensor has 8 elements
//   DDP_RETURN_IF_ERROR(CheckCover({{0, shard_of_rank_0}, {1, shard_of_rank_1}}));
//
// Elements are numbered in row-major order: a tensor's strides do not matter. All errors are
// InvalidArgument and give shape and part. Functions are thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ddp::checkpoint {

// All of it. Held as a tensor of the whole's shape.
struct Whole {
  friend bool operator==(const Whole&, const Whole&) = default;
};

// Indices [offset, offset + sizes), one of each per dimension. Held as a tensor of shape `sizes`.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> sizes;
  friend bool operator==(const Box&, const Box&) = default;
};

// Elements [begin, end) of the flattened tensor. Held as a tensor of one dimension, end - begin
// long. It may be empty, as sharded optimizers have it for what lies with other ranks.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

using Part = std::variant<Whole, Box, FlatRange>;

// What one rank holds of a tensor.
struct Shard {
  std::vector<int64_t> global_shape;
  Part part = Whole{};
};

// "[6, 4]"; "elements [5, 13) of [6, 4]".
std::string ShapeText(absl::Span<const int64_t> shape);
std::string ToString(const Shard& shard);

// Elements of the whole. An error if a size is negative or there are more than int64 has.
absl::StatusOr<int64_t> NumElements(absl::Span<const int64_t> shape);

// Whether the part lies inside the whole.
absl::Status CheckPart(const Shard& shard);

// CheckPart, and whether a tensor of shape `local` is what holds that part.
absl::Status CheckLocal(const Shard& shard, absl::Span<const int64_t> local);

// The shape of the tensor that holds the part. CheckPart(shard) is OK.
std::vector<int64_t> LocalShape(const Shard& shard);

// The boxes that make up a range inside `shape`, in ascending order of elements, and those of each
// box are consecutive: at most 2 per dimension, none for an empty range.
std::vector<Box> BoxesOf(absl::Span<const int64_t> shape, const FlatRange& range);

// The range that the part is, if its elements are consecutive. CheckPart(shard) is OK.
std::optional<FlatRange> FlatRangeOf(const Shard& shard);

struct RankShard {
  int rank;
  Shard shard;
};

// Whether the parts hold every element of one tensor exactly once; boxes and ranges may be mixed.
// An error names the ranks whose shapes differ or whose parts overlap, or what no rank holds.
absl::Status CheckCover(const std::vector<RankShard>& shards);

}  // namespace ddp::checkpoint
