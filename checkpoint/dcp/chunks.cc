#include "checkpoint/dcp/chunks.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::checkpoint::dcp {
namespace {

// Pairs of boxes that are compared at most. A grid of 128 x 128 boxes needs 2 million.
constexpr int64_t kMostComparisons = 50'000'000;

absl::Status Overlap(const std::vector<int64_t>& shape, const Box& a, const Box& b) {
  return absl::DataLossError(absl::StrCat(ToString({.global_shape = shape, .part = a}), " and ",
                                          ToString({.global_shape = shape, .part = b}),
                                          " overlap"));
}

int64_t Elements(const Box& box) {
  return std::accumulate(box.sizes.begin(), box.sizes.end(), int64_t{1}, std::multiplies<>());
}

bool AreDisjoint(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.sizes[d] || b.offset[d] >= a.offset[d] + a.sizes[d]) {
      return true;
    }
  }
  return false;
}

// The dimension in which the boxes begin at the most places.
size_t SweepDimension(const std::vector<int64_t>& shape, const std::vector<const Box*>& boxes) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    std::set<int64_t> offsets;
    for (const Box* box : boxes) offsets.insert(box->offset[d]);
    if (offsets.size() <= most) continue;
    most = offsets.size();
    best = d;
  }
  return best;
}

// Goes along one dimension and compares the boxes that reach over the same index of it.
absl::Status CheckDisjoint(const std::vector<int64_t>& shape, std::vector<const Box*> boxes) {
  if (boxes.size() < 2) return absl::OkStatus();
  if (shape.empty()) return Overlap(shape, *boxes[0], *boxes[1]);
  const size_t d = SweepDimension(shape, boxes);
  std::sort(boxes.begin(), boxes.end(),
            [d](const Box* a, const Box* b) { return a->offset[d] < b->offset[d]; });
  std::vector<const Box*> open;
  int64_t comparisons = 0;
  for (const Box* box : boxes) {
    comparisons += static_cast<int64_t>(open.size());
    if (comparisons > kMostComparisons) {
      return absl::DataLossError("is stored in more chunks than can be compared with each other");
    }
    size_t kept = 0;
    for (const Box* other : open) {
      if (other->offset[d] + other->sizes[d] <= box->offset[d]) continue;
      if (!AreDisjoint(*box, *other)) return Overlap(shape, *other, *box);
      open[kept++] = other;
    }
    open.resize(kept);
    open.push_back(box);
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<Box> Intersection(const Box& a, const Box& b) {
  Box both;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.sizes[d], b.offset[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    both.offset.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

absl::Status CheckChunks(const std::vector<int64_t>& shape, absl::Span<const Box> boxes) {
  const absl::StatusOr<int64_t> elements = NumElements(shape);
  if (!elements.ok()) return absl::DataLossError(elements.status().message());
  std::vector<const Box*> filled;
  // No sum of disjoint boxes is more than `elements`. It could wrap around for others, which are
  // found to overlap first.
  for (const Box& box : boxes) {
    const absl::Status within = CheckPart({.global_shape = shape, .part = box});
    if (!within.ok()) return absl::DataLossError(within.message());
    if (Elements(box) > 0) filled.push_back(&box);
  }
  DDP_RETURN_IF_ERROR(CheckDisjoint(shape, filled));
  int64_t found = 0;
  for (const Box* box : filled) found += Elements(*box);
  if (found == *elements) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("has no chunk with ", *elements - found, " of its ",
                                          *elements, " elements, of shape ", ShapeText(shape)));
}

}  // namespace ddp::checkpoint::dcp
