#include "checkpoint/dcp/chunks.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace ddp::checkpoint::dcp {
namespace {

void ExpectRefused(const std::vector<int64_t>& shape, const std::vector<Box>& boxes,
                   absl::string_view what) {
  const absl::Status status = CheckChunks(shape, boxes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

TEST(ChunksTest, BoxesThatMakeUpTheWhole) {
  using Boxes = std::vector<Box>;
  EXPECT_TRUE(CheckChunks({}, Boxes{Box{}}).ok());
  EXPECT_TRUE(CheckChunks({0, 4}, Boxes{}).ok());
  EXPECT_TRUE(CheckChunks({0, 4}, Boxes{Box{{0, 0}, {0, 4}}}).ok());
  EXPECT_TRUE(CheckChunks({5}, Boxes{Box{{3}, {2}}, Box{{0}, {3}}}).ok());
  EXPECT_TRUE(CheckChunks({5}, Boxes{Box{{0}, {5}}, Box{{5}, {0}}}).ok());
  // Not a grid.
  EXPECT_TRUE(
      CheckChunks({3, 3}, Boxes{Box{{0, 0}, {1, 2}}, Box{{0, 2}, {2, 1}}, Box{{2, 1}, {1, 2}},
                                Box{{1, 0}, {2, 1}}, Box{{1, 1}, {1, 1}}})
          .ok());
}

TEST(ChunksTest, WhatIsMissingOrTwiceIsSaid) {
  ExpectRefused({}, {}, "1 of its 1 elements");
  ExpectRefused({}, {Box{}, Box{}}, "overlap");
  ExpectRefused({5}, {Box{{0}, {3}}}, "2 of its 5 elements, of shape [5]");
  ExpectRefused({5}, {Box{{0}, {3}}, Box{{2}, {3}}},
                "box [3] at [0] of [5] and box [3] at [2] of [5]");
  ExpectRefused({4, 4}, {Box{{0, 0}, {4, 4}}, Box{{2, 2}, {1, 1}}}, "overlap");
  // As many elements as the whole, but one of them twice.
  ExpectRefused({2, 2}, {Box{{0, 0}, {2, 1}}, Box{{0, 0}, {1, 2}}}, "overlap");
  ExpectRefused({5}, {Box{{0}, {6}}}, "reaches outside in dimension 0");
  ExpectRefused({5}, {Box{{-1}, {6}}}, "reaches outside");
  ExpectRefused({5}, {Box{{0, 0}, {5, 1}}}, "one number per dimension");
  ExpectRefused({int64_t{1} << 40, int64_t{1} << 40}, {}, "no tensor has shape");
}

TEST(ChunksTest, ManyChunksTakeLittleTime) {
  constexpr int64_t kSide = 128;
  std::vector<Box> grid;
  for (int64_t i = 0; i < kSide; ++i) {
    for (int64_t j = 0; j < kSide; ++j) grid.push_back(Box{{3 * i, 2 * j}, {3, 2}});
  }
  EXPECT_TRUE(CheckChunks({3 * kSide, 2 * kSide}, grid).ok());
  grid.back().sizes = {3, 1};
  ExpectRefused({3 * kSide, 2 * kSide}, grid, "3 of its");
  // Each crosses each other one in neither dimension, and all begin and end elsewhere: no order of
  // them helps.
  std::vector<Box> hostile;
  constexpr int64_t kMany = 20000;
  for (int64_t i = 0; i < kMany; ++i) hostile.push_back(Box{{i, 0, i}, {kMany - i, kMany, 1}});
  ExpectRefused({kMany, kMany, kMany}, hostile, "more chunks than can be compared");
}

TEST(ChunksTest, Intersections) {
  EXPECT_TRUE(Intersection(Box{{0, 2}, {3, 3}}, Box{{2, 0}, {4, 4}}) == (Box{{2, 2}, {1, 2}}));
  EXPECT_FALSE(Intersection(Box{{0, 2}, {3, 3}}, Box{{3, 2}, {1, 1}}).has_value());
  EXPECT_FALSE(Intersection(Box{{0}, {3}}, Box{{1}, {0}}).has_value());
  EXPECT_TRUE(Intersection(Box{}, Box{}) == Box{});
}

}  // namespace
}  // namespace ddp::checkpoint::dcp
