#include "ddp/zero/bucket_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace ddp::zero {
namespace {

// Whatever the order of arrival: every part is copied once, into a bucket that has memory, buckets
// are reduced in their order, and at most two have memory.
TEST(BucketScheduleTest, RandomBucketsAndArrivals) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const size_t tensors = 1 + random() % 12, buckets = 1 + random() % 8;
    std::vector<std::vector<size_t>> tensors_of(buckets);
    std::multiset<std::pair<size_t, size_t>> expected;
    for (size_t tensor = 0; tensor < tensors; ++tensor) {
      // Consecutive ones, as a large tensor lies; some in none.
      const size_t first = random() % buckets, count = random() % 4;
      for (size_t b = first; b < std::min(buckets, first + count); ++b) {
        tensors_of[b].push_back(tensor);
        expected.emplace(b, tensor);
      }
    }
    std::multiset<std::pair<size_t, size_t>> filled;
    std::set<size_t> open, released;
    std::vector<size_t> launched;
    BucketSchedule schedule(tensors_of, tensors,
                            {.fill =
                                 [&](size_t bucket, size_t tensor) {
                                   filled.emplace(bucket, tensor);
                                   open.insert(bucket);
                                   EXPECT_LE(open.size(), BucketSchedule::kMaxBuckets);
                                   EXPECT_EQ(released.count(tensor), 0);
                                 },
                             .launch =
                                 [&](size_t bucket) {
                                   open.erase(bucket);
                                   launched.push_back(bucket);
                                 },
                             .release =
                                 [&](size_t tensor) {
                                   EXPECT_TRUE(released.insert(tensor).second);
                                   EXPECT_TRUE(schedule.has_arrived(tensor));
                                 }});
    for (int again = 0; again < 2; ++again) {
      std::vector<size_t> arrival(tensors);
      std::iota(arrival.begin(), arrival.end(), size_t{0});
      std::shuffle(arrival.begin(), arrival.end(), random);
      for (const size_t tensor : arrival) schedule.Arrive(tensor);
      EXPECT_EQ(filled, expected);
      EXPECT_EQ(released.size(), tensors);
      EXPECT_EQ(launched.size(), buckets);
      EXPECT_EQ(schedule.launched(), buckets);
      EXPECT_TRUE(std::is_sorted(launched.begin(), launched.end()));
      EXPECT_TRUE(open.empty());
      filled.clear(), released.clear(), launched.clear();
      schedule.Reset();
    }
  }
}

TEST(BucketScheduleTest, InTheOrderOfArrivalNothingIsHeld) {
  const std::vector<std::vector<size_t>> tensors_of = {{0, 1}, {1, 2}, {3}, {3}, {3, 4}};
  const std::vector<int64_t> bytes = {1, 2, 4, 8, 16};
  EXPECT_EQ(PeakOfHeldBytes(tensors_of, bytes, {0, 1, 2, 3, 4}), 0);
  const std::vector<int64_t> reversed = {4, 3, 2, 1, 0};
  // Tensor 4's bucket is open, so that 3, 2 and 1 wait for the first one.
  EXPECT_EQ(PeakOfHeldBytes(tensors_of, bytes, reversed), 8 + 4 + 2);
  const std::vector<size_t> order = OrderByArrival(tensors_of, 5, reversed);
  EXPECT_EQ(order, (std::vector<size_t>{2, 3, 4, 1, 0}));
  std::vector<std::vector<size_t>> adapted;
  for (const size_t bucket : order) adapted.push_back(tensors_of[bucket]);
  EXPECT_EQ(PeakOfHeldBytes(adapted, bytes, reversed), 0);
}

TEST(BucketScheduleTest, WhatDoesNotArriveComesLast) {
  EXPECT_EQ(OrderByArrival({{0}, {1}, {}, {2}}, 3, {2}), (std::vector<size_t>{2, 3, 0, 1}));
}

}  // namespace
}  // namespace ddp::zero
