// Parts of a tensor, as shapes and index ranges: the shard that a rank holds, the part that a
// reader requests, and checks that the shards of all ranks make up the whole. Free of torch.
//
//   Shard rows{.global_shape = {6, 4}, .part = Box{.offset = {2, 0}, .sizes = {2, 4}}};
//   Shard range{.global_shape = {6, 4}, .part = FlatRange{.begin = 5, .end = 13}};
//   DDP_RETURN_IF_ERROR(CheckLocal(range, {8}));   // the rank's tensor has 8 elements
//   DDP_RETURN_IF_ERROR(CheckCover({{0, shard_of_rank_0}, {1, shard_of_rank_1}}));
//
// Elements are numbered in row-major order, whatever the strides of the tensor, or in the order of
// dimensions that `memory_order` gives: {0, 2, 3, 1} numbers those of a channels-last tensor as
// they lie in memory. All errors are InvalidArgument with shape and part. Functions are
// thread-safe.
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

// The whole tensor.
struct Whole {
  friend bool operator==(const Whole&, const Whole&) = default;
};

// Indices [offset, offset + sizes) in each dimension. Stored as a tensor of shape `sizes`.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> sizes;
  friend bool operator==(const Box&, const Box&) = default;
};

// Elements [begin, end) of the flattened tensor, as they are numbered. Stored as a tensor of shape
// [end - begin]. May be empty, as with sharded optimizers for parameters that other ranks hold.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

using Part = std::variant<Whole, Box, FlatRange>;

// The part of a tensor that one rank holds.
struct Shard {
  std::vector<int64_t> global_shape;
  Part part = Whole{};
  // Dimensions from the slowest to the fastest one in the order that ranges count in. Empty:
  // row-major. Boxes are the same in each order.
  std::vector<int64_t> memory_order = {};
};

// All parts of a tensor that one rank holds, which may be none.
struct TensorParts {
  std::string dtype;  // Python's name: "float32"
  std::vector<int64_t> global_shape;
  std::vector<int64_t> memory_order = {};  // as Shard's
  std::vector<Part> parts = {};
};

// "[6, 4]"; "elements [5, 13) of [6, 4]"; "elements [5, 13) of [2, 3, 4, 4] in the order of
// dimensions [0, 2, 3, 1]".
std::string ShapeText(absl::Span<const int64_t> shape);
std::string ToString(const Shard& shard);

// Number of elements of a tensor. An error if a size is negative or the number overflows int64.
absl::StatusOr<int64_t> NumElements(absl::Span<const int64_t> shape);

// OK if `order` is empty or has each dimension of `shape` once.
absl::Status CheckMemoryOrder(absl::Span<const int64_t> shape, absl::Span<const int64_t> order);

// Empty where `order` is row-major; else `order`.
std::vector<int64_t> NormalOrder(std::vector<int64_t> order);

// The same part of the tensor with its dimensions permuted into `memory_order`, which row-major
// numbering fits. Requires CheckPart(shard).ok().
Shard InMemoryOrder(Shard shard);

// OK if the part is within the whole.
absl::Status CheckPart(const Shard& shard);

// CheckPart, and OK if `local` is the shape of a tensor that stores the part.
absl::Status CheckLocal(const Shard& shard, absl::Span<const int64_t> local);

// The shape of the tensor that stores the part. Requires CheckPart(shard).ok().
std::vector<int64_t> LocalShape(const Shard& shard);

// Boxes that make up a range, in ascending order. The elements of each box are consecutive. At most
// 2 per dimension; none for an empty range. `range` must be within `shape`.
std::vector<Box> BoxesOf(absl::Span<const int64_t> shape, const FlatRange& range);

// The part as a range; nullopt if its elements are not consecutive. Requires CheckPart(shard).ok().
std::optional<FlatRange> FlatRangeOf(const Shard& shard);

struct RankShard {
  int rank;
  Shard shard;
};

// OK if the shards hold every element of one tensor exactly once; boxes and ranges may be mixed,
// and a rank may have several. An error names the ranks whose shapes or orders differ or whose
// parts overlap, or the elements that no rank holds.
absl::Status CheckCover(const std::vector<RankShard>& shards);

}  // namespace ddp::checkpoint
