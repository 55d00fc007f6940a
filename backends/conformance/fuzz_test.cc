// Random sequences of collectives, with ranks as threads. A failure names seed and step; longer
// runs: //backends/conformance:rank --fuzz --seed=… --steps=….

#include "backends/conformance/fuzz.h"

#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "backends/conformance/rank_pool.h"
#include "backends/conformance/traits.h"
#include "gtest/gtest.h"

namespace ddp::backends::conformance {
namespace {

class FuzzTest : public testing::TestWithParam<std::tuple<std::string, int, uint64_t>> {};

TEST_P(FuzzTest, RandomSequencesMatchTheReference) {
  const auto& [backend, world_size, seed] = GetParam();
  RankPool pool(backend, world_size, absl::Seconds(30));
  const absl::Status worst = Worst(pool.Run([&, seed = seed](int, Groups& groups) {
    return Fuzz(groups, {.seed = seed, .steps = 200});
  }));
  EXPECT_TRUE(worst.ok()) << worst;
}

INSTANTIATE_TEST_SUITE_P(Backends, FuzzTest,
                         testing::Combine(testing::ValuesIn(ThreadBackends()),
                                          testing::Values(1, 2, 3, 4, 8), testing::Values(1, 2)),
                         [](const testing::TestParamInfo<FuzzTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param), "_fuzz_w",
                                               std::get<1>(info.param), "_seed",
                                               std::get<2>(info.param));
                         });

}  // namespace
}  // namespace ddp::backends::conformance
