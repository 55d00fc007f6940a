#include "checkpoint/parts.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

int64_t Product(absl::Span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

absl::Status Invalid(const Shard& shard, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(ToString(shard), ": ", what));
}

absl::Status CheckBox(const Shard& shard, const Box& box) {
  const size_t dimensions = shard.global_shape.size();
  if (box.offset.size() != dimensions || box.sizes.size() != dimensions) {
    return Invalid(shard, "offset and sizes need one number per dimension");
  }
  for (size_t i = 0; i < dimensions; ++i) {
    // No sum: offset + size may be more than int64 has.
    if (box.offset[i] < 0 || box.sizes[i] < 0 || box.offset[i] > shard.global_shape[i] ||
        box.sizes[i] > shard.global_shape[i] - box.offset[i]) {
      return Invalid(shard, absl::StrCat("reaches outside in dimension ", i));
    }
  }
  return absl::OkStatus();
}

// Appends the boxes of elements [begin, end) of `box`'s dimensions from `dimension` on. Those
// before it are set in `box`.
void AppendBoxes(absl::Span<const int64_t> shape, size_t dimension, int64_t begin, int64_t end,
                 Box& box, std::vector<Box>& boxes) {
  if (begin == end) return;
  if (dimension == shape.size()) {
    boxes.push_back(box);
    return;
  }
  const int64_t inner = Product(shape.subspan(dimension + 1));
  const auto descend = [&](int64_t index, int64_t from, int64_t to) {
    box.offset[dimension] = index;
    box.sizes[dimension] = 1;
    AppendBoxes(shape, dimension + 1, from, to, box, boxes);
  };
  const int64_t first_whole = begin / inner + (begin % inner != 0);
  const int64_t last_whole = end / inner;  // exclusive
  if (first_whole > last_whole) {          // within one index
    descend(last_whole, begin % inner, end % inner);
    return;
  }
  if (begin % inner != 0) descend(first_whole - 1, begin % inner, inner);
  if (first_whole < last_whole) {
    Box whole = box;
    whole.offset[dimension] = first_whole;
    whole.sizes[dimension] = last_whole - first_whole;
    for (size_t i = dimension + 1; i < shape.size(); ++i) {
      whole.offset[i] = 0;
      whole.sizes[i] = shape[i];
    }
    boxes.push_back(std::move(whole));
  }
  if (end % inner != 0) descend(last_whole, 0, end % inner);
}

std::vector<Box> BoxesOfPart(const Shard& shard) {
  if (const auto* box = std::get_if<Box>(&shard.part)) {
    return Product(box->sizes) == 0 ? std::vector<Box>() : std::vector<Box>{*box};
  }
  return BoxesOf(shard.global_shape, *FlatRangeOf(shard));
}

bool Overlap(const Box& a, const Box& b) {
  for (size_t i = 0; i < a.offset.size(); ++i) {
    if (a.offset[i] >= b.offset[i] + b.sizes[i] || b.offset[i] >= a.offset[i] + a.sizes[i]) {
      return false;
    }
  }
  return true;
}

absl::Status Twice(const RankShard& a, const RankShard& b) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", a.rank, " has ", ToString(a.shard),
                                                 " and rank ", b.rank, " has ", ToString(b.shard),
                                                 ", which overlap"));
}

absl::Status OnNoRank(const FlatRange& range, const std::vector<int64_t>& shape) {
  return absl::InvalidArgumentError(
      absl::StrCat("no rank has ", ToString({.global_shape = shape, .part = range})));
}

// All parts are ranges, as those of sharded optimizers: by sorting.
absl::Status CheckRangesCover(std::vector<std::pair<FlatRange, const RankShard*>> ranges,
                              const std::vector<int64_t>& shape) {
  std::stable_sort(ranges.begin(), ranges.end(),
                   [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  int64_t next = 0;
  const RankShard* last = nullptr;
  for (const auto& [range, shard] : ranges) {
    if (range.begin == range.end) continue;
    if (range.begin < next) return Twice(*last, *shard);
    if (range.begin > next) return OnNoRank({next, range.begin}, shape);
    next = range.end;
    last = shard;
  }
  const int64_t elements = Product(shape);
  return next == elements ? absl::OkStatus() : OnNoRank({next, elements}, shape);
}

// Any parts: no two boxes overlap, and together they are as large as the whole.
absl::Status CheckBoxesCover(const std::vector<RankShard>& shards) {
  std::vector<std::pair<Box, const RankShard*>> boxes;
  int64_t elements = 0;
  for (const RankShard& shard : shards) {
    for (Box& box : BoxesOfPart(shard.shard)) {
      for (const auto& [other, owner] : boxes) {
        if (owner != &shard && Overlap(box, other)) return Twice(*owner, shard);
      }
      elements += Product(box.sizes);
      boxes.emplace_back(std::move(box), &shard);
    }
  }
  const std::vector<int64_t>& shape = shards.front().shard.global_shape;
  const int64_t missing = Product(shape) - elements;
  if (missing == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "no rank has ", missing, " of the ", Product(shape), " elements of ", ShapeText(shape)));
}

}  // namespace

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string ToString(const Shard& shard) {
  std::string whole = ShapeText(shard.global_shape);
  if (!shard.memory_order.empty() && std::holds_alternative<FlatRange>(shard.part)) {
    absl::StrAppend(&whole, " in the order of dimensions ", ShapeText(shard.memory_order));
  }
  if (const auto* box = std::get_if<Box>(&shard.part)) {
    return absl::StrCat("box ", ShapeText(box->sizes), " at ", ShapeText(box->offset), " of ",
                        whole);
  }
  if (const auto* range = std::get_if<FlatRange>(&shard.part)) {
    return absl::StrCat("elements [", range->begin, ", ", range->end, ") of ", whole);
  }
  return absl::StrCat("all of ", whole);
}

absl::StatusOr<int64_t> NumElements(absl::Span<const int64_t> shape) {
  // Also of an empty tensor the product of the other sizes must be a number: strides are made of
  // it.
  int64_t elements = 1;
  bool empty = false;
  for (int64_t size : shape) {
    empty = empty || size == 0;
    if (size < 0 || __builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements)) {
      return absl::InvalidArgumentError(absl::StrCat("no tensor has shape ", ShapeText(shape)));
    }
  }
  return empty ? 0 : elements;
}

absl::Status CheckMemoryOrder(absl::Span<const int64_t> shape, absl::Span<const int64_t> order) {
  if (order.empty()) return absl::OkStatus();
  std::vector<bool> seen(shape.size());
  bool each_once = order.size() == shape.size();
  for (size_t i = 0; each_once && i < order.size(); ++i) {
    const auto dimension = static_cast<size_t>(order[i]);
    each_once = dimension < seen.size() && !seen[dimension];
    if (each_once) seen[dimension] = true;
  }
  if (each_once) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      ShapeText(order), " is no order of the dimensions of a tensor of shape ", ShapeText(shape)));
}

std::vector<int64_t> NormalOrder(std::vector<int64_t> order) {
  if (std::is_sorted(order.begin(), order.end())) order.clear();
  return order;
}

Shard InMemoryOrder(Shard shard) {
  if (shard.memory_order.empty()) return shard;
  const auto permuted = [&](const std::vector<int64_t>& values) {
    std::vector<int64_t> result;
    for (int64_t dimension : shard.memory_order) {
      result.push_back(values[static_cast<size_t>(dimension)]);
    }
    return result;
  };
  if (auto* box = std::get_if<Box>(&shard.part)) {
    *box = Box{.offset = permuted(box->offset), .sizes = permuted(box->sizes)};
  }
  shard.global_shape = permuted(shard.global_shape);
  shard.memory_order.clear();
  return shard;
}

absl::Status CheckPart(const Shard& shard) {
  DDP_ASSIGN_OR_RETURN(const int64_t elements, NumElements(shard.global_shape));
  DDP_RETURN_IF_ERROR(CheckMemoryOrder(shard.global_shape, shard.memory_order));
  if (const auto* box = std::get_if<Box>(&shard.part)) return CheckBox(shard, *box);
  if (const auto* range = std::get_if<FlatRange>(&shard.part)) {
    if (range->begin < 0 || range->begin > range->end || range->end > elements) {
      return Invalid(shard, absl::StrCat("not within its ", elements, " elements"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLocal(const Shard& shard, absl::Span<const int64_t> local) {
  DDP_RETURN_IF_ERROR(CheckPart(shard));
  const std::vector<int64_t> expected = LocalShape(shard);
  if (local == absl::MakeConstSpan(expected)) return absl::OkStatus();
  return Invalid(shard, absl::StrCat("its tensor has shape ", ShapeText(local), " instead of ",
                                     ShapeText(expected)));
}

std::vector<int64_t> LocalShape(const Shard& shard) {
  if (const auto* box = std::get_if<Box>(&shard.part)) return box->sizes;
  if (const auto* range = std::get_if<FlatRange>(&shard.part)) return {range->end - range->begin};
  return shard.global_shape;
}

std::vector<Box> BoxesOf(absl::Span<const int64_t> shape, const FlatRange& range) {
  std::vector<Box> boxes;
  Box box{.offset = std::vector<int64_t>(shape.size()),
          .sizes = std::vector<int64_t>(shape.size())};
  AppendBoxes(shape, 0, range.begin, range.end, box, boxes);
  return boxes;
}

std::optional<FlatRange> FlatRangeOf(const Shard& shard) {
  const std::vector<int64_t>& shape = shard.global_shape;
  if (const auto* range = std::get_if<FlatRange>(&shard.part)) return *range;
  const auto* box = std::get_if<Box>(&shard.part);
  if (box == nullptr) return FlatRange{0, Product(shape)};
  const int64_t elements = Product(box->sizes);
  if (elements == 0) return FlatRange{0, 0};
  // Single indices, then a run of them, then dimensions that are taken whole.
  size_t run = 0;
  while (run < shape.size() && box->sizes[run] == 1) ++run;
  int64_t begin = 0;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > run && box->sizes[i] != shape[i]) return std::nullopt;
    begin = begin * shape[i] + box->offset[i];
  }
  return FlatRange{begin, begin + elements};
}

absl::Status CheckCover(const std::vector<RankShard>& shards) {
  if (shards.empty()) return absl::InvalidArgumentError("no rank has any part");
  const Shard& first = shards.front().shard;
  for (const auto& [rank, shard] : shards) {
    DDP_RETURN_IF_ERROR(Annotate(CheckPart(shard), absl::StrCat("of rank ", rank)));
    if (shard.global_shape != first.global_shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the whole has shape ", ShapeText(first.global_shape), " on rank ", shards.front().rank,
          " and ", ShapeText(shard.global_shape), " on rank ", rank));
    }
    if (shard.memory_order != first.memory_order) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the order of dimensions is ", ShapeText(first.memory_order), " on rank ",
          shards.front().rank, " and ", ShapeText(shard.memory_order), " on rank ", rank));
    }
  }
  std::vector<RankShard> permuted;
  if (!first.memory_order.empty()) {
    for (const auto& [rank, shard] : shards) permuted.push_back({rank, InMemoryOrder(shard)});
  }
  const std::vector<RankShard>& all = permuted.empty() ? shards : permuted;
  std::vector<std::pair<FlatRange, const RankShard*>> ranges;
  for (const RankShard& shard : all) {
    if (std::optional<FlatRange> range = FlatRangeOf(shard.shard)) {
      ranges.emplace_back(*range, &shard);
    }
  }
  const absl::Status covered = ranges.size() == all.size()
                                   ? CheckRangesCover(ranges, all.front().shard.global_shape)
                                   : CheckBoxesCover(all);
  if (covered.ok() || permuted.empty()) return covered;
  return Annotate(covered, absl::StrCat("with dimensions in the order of memory, ",
                                        ShapeText(first.memory_order)));
}

}  // namespace ddp::checkpoint
