#include "base/environment.h"

#include <stdlib.h>

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
  EXPECT_EQ(env.GetInt("N", 8, 9).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(env.GetInt("WORD", 0, 9).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(env.GetInt("NONE", 0, 9).status().code(), absl::StatusCode::kNotFound);
}

TEST(EnvironmentTest, DescribeListsWhatIsSet) {
  Environment env = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  EXPECT_EQ(env.Describe({"RANK", "LOCAL_RANK", "WORLD_SIZE"}), "RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(env.Describe({"X"}), "none");
  env = {{"MASTER_ADDR", "node0\r\n"}};
  EXPECT_EQ(env.Describe({"MASTER_ADDR"}), "MASTER_ADDR=node0\\r\\n");
}

TEST(EnvironmentTest, ASnapshotOfTheProcessStaysAsItWas) {
  ASSERT_EQ(setenv("DDP_TEST_A", "x=y", 1), 0);
  ASSERT_EQ(unsetenv("DDP_TEST_B"), 0);
  const Environment env = Environment::FromProcess();
  setenv("DDP_TEST_A", "z", 1);
  setenv("DDP_TEST_B", "z", 1);
  EXPECT_EQ(*env.Get("DDP_TEST_A"), "x=y");
  EXPECT_FALSE(env.Has("DDP_TEST_B"));
}

TEST(EnvironmentTest, ReadsAreRecordedAndDescriptionsAreNot) {
  std::set<std::string> names;
  Environment env = {{"A", "1"}};
  env.RecordReads(&names);
  EXPECT_EQ(env.Describe({"A"}), "A=1");
  EXPECT_TRUE(names.empty());
  const Environment copy = env;
  EXPECT_TRUE(copy.Has("A"));
  EXPECT_FALSE(env.Get("B").has_value());
  EXPECT_FALSE(env.GetInt("C", 0, 9).ok());
  EXPECT_EQ(names, std::set<std::string>({"A", "B", "C"}));
}

}  // namespace
}  // namespace ddp
