#include "ddp/bucket_limits.h"

#include <limits>

#include "gtest/gtest.h"

namespace ddp {
namespace {

constexpr int64_t kMb = 1024 * 1024;
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

TEST(BucketLimitsTest, ByDefaultTheFirstBucketIsSmall) {
  const BucketLimits limits = ChooseBucketLimits({}, false);
  EXPECT_EQ(limits.first, kMb);
  EXPECT_EQ(limits.others, 25 * kMb);
  EXPECT_EQ(limits.initial, std::vector<size_t>{kNoLimit});
}

TEST(BucketLimitsTest, ItIsNotWhereCollectivesInterruptBackward) {
  EXPECT_EQ(ChooseBucketLimits({}, true).first, 25 * kMb);
  // The first layout stays as it is.
  const BucketLimits limits = ChooseBucketLimits({.find_unused_parameters = true}, true);
  EXPECT_EQ(limits.initial, (std::vector<size_t>{kMb, 25 * kMb}));
}

TEST(BucketLimitsTest, AnExplicitSizeHoldsForAllBuckets) {
  for (const bool interrupts : {false, true}) {
    const BucketLimits limits = ChooseBucketLimits({.bucket_cap_mb = 0.5}, interrupts);
    EXPECT_EQ(limits.first, kMb / 2);
    EXPECT_EQ(limits.others, kMb / 2);
    EXPECT_EQ(limits.initial, std::vector<size_t>{kNoLimit});
    EXPECT_EQ(ChooseBucketLimits({.bucket_cap_mb = 2, .find_unused_parameters = true}, interrupts)
                  .initial,
              (std::vector<size_t>{2 * kMb, 2 * kMb}));
  }
}

TEST(BucketLimitsTest, AStaticGraphHasOneBucketUntilTheyAreRebuilt) {
  EXPECT_EQ(
      ChooseBucketLimits({.find_unused_parameters = true, .static_graph = true}, false).initial,
      std::vector<size_t>{kNoLimit});
}

// Each rank needs one core more than backward has threads.
TEST(BackwardUsesAllCoresTest, CountsOneCoreForTheCollectivesOfEachRank) {
  EXPECT_TRUE(BackwardUsesAllCores(/*cores=*/2, /*ranks=*/2, /*threads_per_rank=*/1));
  EXPECT_TRUE(BackwardUsesAllCores(3, 2, 1));
  EXPECT_FALSE(BackwardUsesAllCores(4, 2, 1));
  EXPECT_TRUE(BackwardUsesAllCores(8, 2, 4));
  EXPECT_FALSE(BackwardUsesAllCores(10, 2, 4));
}

}  // namespace
}  // namespace ddp
