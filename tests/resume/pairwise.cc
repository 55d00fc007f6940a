#include "tests/resume/pairwise.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace ddp {
namespace {

// Calls `visit` with a number for each pair of values of two dimensions of `c`. `values` is more
// than any value.
template <typename Visit>
void VisitPairs(const Case& c, size_t values, const Visit& visit) {
  for (size_t a = 0; a < c.size(); ++a) {
    for (size_t b = a + 1; b < c.size(); ++b) {
      visit(((a * c.size() + b) * values + static_cast<size_t>(c[a])) * values +
            static_cast<size_t>(c[b]));
    }
  }
}

}  // namespace

std::vector<Case> AllCases(const std::vector<int>& counts,
                           const std::function<bool(const Case&)>& feasible) {
  std::vector<Case> cases = {{}};
  for (const int count : counts) {
    std::vector<Case> longer;
    for (const Case& begun : cases) {
      for (int value = 0; value < count; ++value) {
        longer.push_back(begun);
        longer.back().push_back(value);
      }
    }
    cases = std::move(longer);
  }
  std::erase_if(cases, [&](const Case& c) { return !feasible(c); });
  return cases;
}

std::vector<Case> PairwiseCover(const std::vector<Case>& cases) {
  if (cases.empty()) return {};
  size_t values = 1;
  for (const Case& c : cases) {
    for (const int value : c) values = std::max(values, static_cast<size_t>(value) + 1);
  }
  const size_t dimensions = cases[0].size();
  std::vector<char> uncovered(dimensions * dimensions * values * values, 0);
  for (const Case& c : cases) VisitPairs(c, values, [&](size_t pair) { uncovered[pair] = 1; });
  std::vector<Case> cover;
  while (true) {
    const Case* best = nullptr;
    size_t most = 0;
    for (const Case& c : cases) {
      size_t found = 0;
      VisitPairs(c, values, [&](size_t pair) { found += static_cast<size_t>(uncovered[pair]); });
      if (found > most) {
        most = found;
        best = &c;
      }
    }
    if (best == nullptr) return cover;
    cover.push_back(*best);
    VisitPairs(*best, values, [&](size_t pair) { uncovered[pair] = 0; });
  }
}

}  // namespace ddp
