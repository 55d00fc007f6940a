#include "base/nearest.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp {

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

bool IsNear(size_t distance, absl::string_view name) {
  return distance <= std::max<size_t>(2, name.size() / 3);
}

std::string DidYouMean(absl::string_view name, const std::vector<std::string>& candidates) {
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name, candidate);
    if (IsNear(distance, name)) near.emplace_back(distance, candidate);
  }
  return DidYouMean(std::move(near));
}

std::string DidYouMean(std::vector<std::pair<size_t, std::string>> near) {
  if (near.empty()) return "";
  std::sort(near.begin(), near.end());
  if (near.size() > 3) near.resize(3);
  std::string advice;
  for (const auto& [distance, candidate] : near) {
    absl::StrAppend(&advice, advice.empty() ? "; did you mean " : ", ", candidate);
  }
  return advice + "?";
}

}  // namespace ddp
