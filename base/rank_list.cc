#include "base/rank_list.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp {

std::string RankList(const std::vector<int>& ranks) {
  constexpr size_t kShortestRange = 3;
  std::vector<std::string> parts;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i >= kShortestRange) {
      parts.push_back(absl::StrCat(ranks[i], "-", ranks[end - 1]));
      i = end;
    } else {
      parts.push_back(absl::StrCat(ranks[i++]));
    }
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(parts, ", "));
}

}  // namespace ddp
