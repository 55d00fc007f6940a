#include "ddp/gather/gather.h"

#include <algorithm>

#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {
namespace {

using Dict = std::map<std::string, double>;

// The first name that only one of the two has.
absl::Status CheckNames(const Dict& ours, const Dict& theirs, size_t rank) {
  const auto compare = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), compare)) {
    return absl::OkStatus();
  }
  const auto [a, b] =
      std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end(), compare);
  const bool only_ours = b == theirs.end() || (a != ours.end() && a->first < b->first);
  return absl::FailedPreconditionError(absl::StrCat("'", only_ours ? a->first : b->first,
                                                    "' is on rank ", only_ours ? 0 : rank,
                                                    ", but not on rank ", only_ours ? rank : 0));
}

}  // namespace

absl::StatusOr<Dict> ReduceDict(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                const Dict& scalars, DictReduction reduction) {
  DDP_ASSIGN_OR_RETURN(const std::vector<Dict> all, AllGather(group, scalars));
  for (size_t r = 1; r < all.size(); ++r) DDP_RETURN_IF_ERROR(CheckNames(all[0], all[r], r));
  Dict result = all[0];
  for (auto& [name, value] : result) {
    for (size_t r = 1; r < all.size(); ++r) value += all[r].at(name);
    if (reduction == DictReduction::kMean) value /= static_cast<double>(all.size());
  }
  return result;
}

}  // namespace ddp
