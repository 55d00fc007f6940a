// Ranks that are killed: a few in each collective. The long form is
// //backends/conformance:rank --kills=1000.

#include "backends/conformance/kill.h"

#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/conformance/traits.h"
#include "gtest/gtest.h"

namespace ddp::backends::conformance {
namespace {

class KillTest : public testing::TestWithParam<std::tuple<std::string, Op>> {};

TEST_P(KillTest, SurvivorsGetAnErrorAndCanGoOn) {
  const auto& [backend, op] = GetParam();
  const Case c{.op = op, .world_size = 2};
  if (FindGap(TraitsOf(backend), c) != nullptr) GTEST_SKIP() << backend << " has no " << Name(op);
  const KillReport report =
      RunKills({.backend = backend, .kills = 2, .seed = static_cast<uint64_t>(op) + 1, .op = op});
  EXPECT_TRUE(report.failures.empty()) << absl::StrJoin(report.failures, "\n");
  EXPECT_EQ(report.kills, 2);
  EXPECT_GE(report.errors, 2);
  RecordProperty("summary", Summary(report));
}

INSTANTIATE_TEST_SUITE_P(Backends, KillTest,
                         testing::Combine(testing::ValuesIn(ThreadBackends()),
                                          testing::ValuesIn(AllOps().begin(), AllOps().end())),
                         [](const testing::TestParamInfo<KillTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param), "_",
                                               Name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace ddp::backends::conformance
