// Every backend against the reference, with ranks as threads: a cover of all pairs of operation,
// reduction, dtype, size, layout, mode, kind of group and world size.

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/conformance/case.h"
#include "backends/conformance/cover.h"
#include "backends/conformance/rank_pool.h"
#include "backends/conformance/traits.h"
#include "gtest/gtest.h"

namespace ddp::backends::conformance {
namespace {

struct Param {
  std::string backend;
  Case c;
};

std::vector<Param> Params() {
  std::vector<Param> params;
  const std::vector<Case> cover = PairwiseCover();
  for (const std::string& backend : ThreadBackends()) {
    for (const Case& c : cover) {
      const Gap* gap = FindGap(TraitsOf(backend), c);
      if (gap == nullptr || gap->always) params.push_back({backend, c});
    }
  }
  return params;
}

class CasesTest : public testing::TestWithParam<Param> {
 protected:
  static RankPool& Pool(const Param& param) {
    auto& pool = (*pools_)[{param.backend, param.c.world_size}];
    if (pool == nullptr) {
      pool = std::make_unique<RankPool>(param.backend, param.c.world_size, absl::Seconds(30));
    }
    return *pool;
  }

  static void SetUpTestSuite() { pools_ = new Pools(); }
  static void TearDownTestSuite() { delete pools_; }

 private:
  using Pools = std::map<std::pair<std::string, int>, std::unique_ptr<RankPool>>;
  static inline Pools* pools_ = nullptr;
};

TEST_P(CasesTest, MatchesTheReference) {
  const Case& c = GetParam().c;
  RankPool& pool = Pool(GetParam());
  static uint64_t salt = 0;
  salt += 1000;
  const std::vector<absl::Status> statuses =
      pool.Run([&](int, Groups& groups) { return groups.Run(c, salt); });
  const absl::Status worst = Worst(statuses);
  const Gap* gap = FindGap(TraitsOf(GetParam().backend), c);
  if (gap == nullptr) {
    EXPECT_TRUE(worst.ok()) << worst;
  } else {
    EXPECT_FALSE(worst.ok()) << "traits.cc says that there is a gap: " << gap->what;
    EXPECT_FALSE(absl::IsDataLoss(worst)) << worst;
  }
  if (!worst.ok()) pool.Reset();
}

INSTANTIATE_TEST_SUITE_P(Backends, CasesTest, testing::ValuesIn(Params()),
                         [](const testing::TestParamInfo<Param>& info) {
                           return absl::StrCat(info.param.backend, "_", CaseName(info.param.c));
                         });

}  // namespace
}  // namespace ddp::backends::conformance
