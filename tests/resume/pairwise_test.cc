#include "tests/resume/pairwise.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "gtest/gtest.h"

namespace ddp {
namespace {

bool AnyHas(const std::vector<Case>& cases, size_t a, int i, size_t b, int j) {
  return std::any_of(cases.begin(), cases.end(),
                     [&](const Case& c) { return c[a] == i && c[b] == j; });
}

// A case without these two pairs, which exclude each other in the same dimension.
bool Feasible(const Case& c) { return !(c[0] == 0 && c[1] == 1) && !(c[2] == 2 && c[3] > 0); }

const std::vector<int> kCounts = {4, 2, 3, 3, 2, 1};

TEST(AllCasesTest, AreTheFeasibleOnesOnce) {
  const std::vector<Case> cases = AllCases(kCounts, &Feasible);
  EXPECT_EQ(cases.size(), (4 * 2 - 1) * (3 * 3 - 2) * 2);
  EXPECT_TRUE(std::is_sorted(cases.begin(), cases.end()));
  EXPECT_EQ(std::adjacent_find(cases.begin(), cases.end()), cases.end());
  EXPECT_TRUE(std::all_of(cases.begin(), cases.end(), &Feasible));
}

TEST(PairwiseCoverTest, HasEachFeasiblePairInFewFeasibleCases) {
  const std::vector<Case> cases = AllCases(kCounts, &Feasible);
  const std::vector<Case> cover = PairwiseCover(cases);
  for (const Case& c : cover) EXPECT_TRUE(Feasible(c));
  int pairs = 0;
  for (size_t a = 0; a < kCounts.size(); ++a) {
    for (size_t b = a + 1; b < kCounts.size(); ++b) {
      for (int i = 0; i < kCounts[a]; ++i) {
        for (int j = 0; j < kCounts[b]; ++j) {
          const bool feasible =
              !(a == 0 && b == 1 && i == 0 && j == 1) && !(a == 2 && b == 3 && i == 2 && j > 0);
          EXPECT_EQ(AnyHas(cases, a, i, b, j), feasible);
          EXPECT_EQ(AnyHas(cover, a, i, b, j), feasible) << a << i << b << j;
          pairs += feasible;
        }
      }
    }
  }
  EXPECT_EQ(pairs, 7 + 12 + 12 + 8 + 4 + 6 + 6 + 4 + 2 + 7 + 6 + 3 + 6 + 3 + 2);
  // 4 * 3 pairs of two dimensions need as many cases.
  EXPECT_GE(cover.size(), 12);
  EXPECT_LE(cover.size(), 15);
  EXPECT_EQ(PairwiseCover(cases), cover);
}

TEST(PairwiseCoverTest, OfNothingIsNothing) { EXPECT_TRUE(PairwiseCover({}).empty()); }

}  // namespace
}  // namespace ddp
