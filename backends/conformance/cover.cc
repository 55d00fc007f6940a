#include "backends/conformance/cover.h"

#include <array>
#include <set>
#include <string>

#include "backends/conformance/plan.h"

namespace ddp::backends::conformance {
namespace {

// Operation and reduction are one dimension: few of the former take the latter.
enum Dimension { kOperation, kDtype, kWorld, kSize, kLayout, kMode, kScope, kDimensions };
using Levels = std::array<int, kDimensions>;  // -1: not chosen yet

struct OpWithReduction {
  Op op;
  ReductionOp reduction;
};

const std::vector<OpWithReduction>& AllOpsWithReductions() {
  static const auto* ops = [] {
    auto* list = new std::vector<OpWithReduction>();
    for (Op op : AllOps()) {
      for (ReductionOp reduction : AllReductions()) {
        if (HasReduction(op) || reduction == ReductionOp::kSum) list->push_back({op, reduction});
      }
    }
    return list;
  }();
  return *ops;
}

const Levels& LevelCounts() {
  static const Levels counts = {static_cast<int>(AllOpsWithReductions().size()),
                                static_cast<int>(AllDtypes().size()),
                                static_cast<int>(AllWorldSizes().size()),
                                static_cast<int>(Counts(c10::ScalarType::Float).size()),
                                static_cast<int>(AllLayouts().size()),
                                static_cast<int>(AllModes().size()),
                                static_cast<int>(AllScopes().size())};
  return counts;
}

// A dimension that is not chosen yet takes the value that is the least likely to be in the way.
Case ToCase(const Levels& levels) {
  const auto level = [&](Dimension d, int otherwise) {
    return levels[d] >= 0 ? levels[d] : otherwise;
  };
  Case c;
  if (levels[kOperation] >= 0) {
    c.op = AllOpsWithReductions()[levels[kOperation]].op;
    c.reduction = AllOpsWithReductions()[levels[kOperation]].reduction;
  }
  c.world_size = AllWorldSizes()[level(kWorld, 0)];
  c.layout = AllLayouts()[level(kLayout, 0)];
  c.mode = AllModes()[level(kMode, 0)];
  c.scope = AllScopes()[level(kScope, 0)];
  c.dtype = AllDtypes()[level(kDtype, 0)];
  c.count = Counts(c.dtype)[level(kSize, 0)];
  if (!MovesData(c.op)) {
    c.dtype = c10::ScalarType::Float;
    c.count = 0;
    c.layout = TensorLayout::kContiguous;
  }
  return c;
}

bool IsFeasible(const Levels& levels, int64_t max_bytes) {
  if (levels[kWorld] < 0) {
    // A few ranks may have too few members for a scope, and many ranks too many bytes.
    Levels with_world = levels;
    for (with_world[kWorld] = 0; with_world[kWorld] < LevelCounts()[kWorld]; ++with_world[kWorld]) {
      if (IsFeasible(with_world, max_bytes)) return true;
    }
    return false;
  }
  const Case c = ToCase(levels);
  // A dimension that is not chosen yet must not make the case look meaningless.
  Case chosen = c;
  if (levels[kSize] < 0) chosen.count = 8;
  if (levels[kOperation] < 0) chosen.op = Op::kAllgather;
  if (levels[kDtype] < 0) {
    const bool bitwise = chosen.reduction == ReductionOp::kBand ||
                         chosen.reduction == ReductionOp::kBor ||
                         chosen.reduction == ReductionOp::kBxor;
    chosen.dtype = bitwise ? c10::ScalarType::Long : c10::ScalarType::Float;
  }
  if (!IsMeaningful(chosen)) return false;
  return TotalBytes(c) <= max_bytes;
}

class PairCover {
 public:
  explicit PairCover(int64_t max_bytes) : max_bytes_(max_bytes) {
    int offset = 0;
    for (int d = 0; d < kDimensions; ++d) {
      offsets_[d] = offset;
      offset += LevelCounts()[d];
    }
    total_ = offset;
    covered_.assign(static_cast<size_t>(total_) * total_, false);
  }

  std::vector<Levels> Make() {
    std::vector<Levels> rows;
    for (int a = 0; a < kDimensions; ++a) {
      for (int b = a + 1; b < kDimensions; ++b) {
        for (int i = 0; i < LevelCounts()[a]; ++i) {
          for (int j = 0; j < LevelCounts()[b]; ++j) {
            if (Covered(a, i, b, j)) continue;
            Levels row;
            row.fill(-1);
            row[a] = i;
            row[b] = j;
            if (Complete(row)) rows.push_back(row);
          }
        }
      }
    }
    return rows;
  }

 private:
  std::vector<bool>::reference Covered(int a, int i, int b, int j) {
    return covered_[static_cast<size_t>(offsets_[a] + i) * total_ + offsets_[b] + j];
  }

  // Chooses what is left open so that the most new pairs come in; false if nothing fits.
  bool Complete(Levels& row) {
    if (!IsFeasible(row, max_bytes_)) return false;
    for (int d = 0; d < kDimensions; ++d) {
      if (row[d] >= 0) continue;
      int best = -1, best_gain = -1;
      for (int n = 0; n < LevelCounts()[d]; ++n) {
        // Ties fall to different levels in different rows, in no step with other dimensions.
        const int level = (n + turn_ * (2 * d + 1) + turn_ / 7 * d) % LevelCounts()[d];
        row[d] = level;
        const int gain = Gain(row, d);
        if (gain > best_gain && IsFeasible(row, max_bytes_)) {
          best = level;
          best_gain = gain;
        }
      }
      if (best < 0) return false;
      row[d] = best;
    }
    ++turn_;
    for (int a = 0; a < kDimensions; ++a) {
      for (int b = a + 1; b < kDimensions; ++b) Covered(a, row[a], b, row[b]) = true;
    }
    return true;
  }

  // New pairs of dimension d with those already chosen.
  int Gain(const Levels& row, int d) {
    int gain = 0;
    for (int other = 0; other < kDimensions; ++other) {
      if (other == d || row[other] < 0) continue;
      const int a = std::min(d, other), b = std::max(d, other);
      gain += !Covered(a, row[a], b, row[b]);
    }
    return gain;
  }

  const int64_t max_bytes_;
  Levels offsets_;
  int total_ = 0;
  int turn_ = 0;
  std::vector<bool> covered_;
};

}  // namespace

absl::Span<const int> AllWorldSizes() {
  static constexpr int kSizes[] = {1, 2, 3, 4, 8};
  return kSizes;
}

std::vector<int64_t> Counts(c10::ScalarType dtype) {
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<int64_t> counts = {0, 1, 7};
  // At these sizes shm goes from one algorithm to the next, or its chunks and their shares end.
  constexpr int64_t kKiB = 1024;
  for (int64_t bytes :
       {int64_t{56}, kKiB, 8 * kKiB, 32 * kKiB, 128 * kKiB, 256 * kKiB, kKiB * kKiB}) {
    for (int64_t delta : {-1, 0, 1}) counts.push_back(bytes / width + delta);
  }
  counts.push_back((int64_t{3} << 19) / width + 5);
  return counts;
}

int64_t TotalBytes(const Case& c) {
  int64_t elements = 0;
  for (int rank = 0; rank < c.world_size; ++rank) {
    const Plan plan = MakePlan(c.op, c.count, c.world_size, rank, /*root=*/0);
    for (int64_t input : plan.inputs) elements += input;
    if (plan.in_place) continue;
    for (const auto& output : plan.outputs) elements += TotalCount(output);
  }
  return elements * static_cast<int64_t>(c10::elementSize(c.dtype));
}

std::vector<Case> PairwiseCover(int64_t max_bytes) {
  std::vector<Case> cases;
  std::set<std::string> seen;
  for (const Levels& levels : PairCover(max_bytes).Make()) {
    const Case c = ToCase(levels);
    if (seen.insert(CaseName(c)).second) cases.push_back(c);
  }
  return cases;
}

int64_t FullProductSize() {
  int64_t size = 1;
  for (int count : LevelCounts()) size *= count;
  return size;
}

std::optional<Case> FullProduct(int64_t index) {
  Levels levels;
  for (int d = 0; d < kDimensions; ++d) {
    levels[d] = static_cast<int>(index % LevelCounts()[d]);
    index /= LevelCounts()[d];
  }
  const Case c = ToCase(levels);
  // An operation that moves no data has one dtype, size and layout.
  const bool repeated =
      !MovesData(c.op) && (levels[kDtype] != 0 || levels[kSize] != 0 || levels[kLayout] != 0);
  if (repeated || !IsMeaningful(c)) return std::nullopt;
  return c;
}

}  // namespace ddp::backends::conformance
