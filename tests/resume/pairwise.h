// Chooses few cases of many: each pair of values of two dimensions that occurs in some case occurs
// in a chosen one. For tests whose product of dimensions takes hours.
//
//   std::vector<Case> all = AllCases({4, 2, 3}, [](const Case& c) { return c[0] > 0 || c[1] == 0;
//   }); for (const Case& c : PairwiseCover(all)) …
#pragma once

#include <functional>
#include <vector>

namespace ddp {

// The index of a value of each dimension.
using Case = std::vector<int>;

// All combinations of `counts[d]` values of each dimension d for which `feasible` holds, in
// lexicographic order.
std::vector<Case> AllCases(const std::vector<int>& counts,
                           const std::function<bool(const Case&)>& feasible);

// Some of `cases`, which all have the same number of dimensions, with all pairs of `cases`. Takes
// again and again the case with the most pairs that are not covered yet, of equal ones the first.
std::vector<Case> PairwiseCover(const std::vector<Case>& cases);

}  // namespace ddp
