#include "base/environment.h"

#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(EnvironmentTest, EmptyCountsAsAbsent) {
  Environment env = {{"A", ""}, {"B", "x"}};
  EXPECT_FALSE(env.Has("A"));
  EXPECT_EQ(*env.Get("B"), "x");
  EXPECT_FALSE(env.Has("C"));
}

TEST(EnvironmentTest, IntegersAreCheckedAndNamed) {
  Environment env = {{"N", "7"}, {"BIG", "70"}, {"WORD", "seven"}};
  EXPECT_EQ(*env.GetInt("N", 0, 9), 7);
  EXPECT_EQ(env.GetInt("BIG", 0, 9).status().message(),
            "environment variable BIG='70' is not an integer in [0, 9]");
  EXPECT_EQ(env.GetInt("WORD", 0, 9).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(env.GetInt("NONE", 0, 9).status().code(), absl::StatusCode::kNotFound);
}

TEST(EnvironmentTest, DescribeListsWhatIsSet) {
  Environment env = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  EXPECT_EQ(env.Describe({"RANK", "LOCAL_RANK", "WORLD_SIZE"}), "RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(env.Describe({"X"}), "none");
}

}  // namespace
}  // namespace ddp
