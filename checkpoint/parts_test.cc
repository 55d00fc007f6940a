#include "checkpoint/parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

namespace ddp::checkpoint {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
using Sizes = std::vector<int64_t>;

void ExpectInvalid(const absl::Status& status, absl::string_view what) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

// Row-major numbers of the elements of a part, found by counting through the whole.
std::vector<int64_t> Elements(const Shard& shard) {
  const Sizes& shape = shard.global_shape;
  const int64_t count = NumElements(shape).value();
  std::vector<int64_t> elements;
  for (int64_t element = 0; element < count; ++element) {
    bool inside = true;
    if (const auto* range = std::get_if<FlatRange>(&shard.part)) {
      inside = element >= range->begin && element < range->end;
    } else if (const auto* box = std::get_if<Box>(&shard.part)) {
      int64_t rest = element;
      for (size_t i = shape.size(); i-- > 0;) {
        const int64_t index = rest % shape[i];
        rest /= shape[i];
        inside = inside && index >= box->offset[i] && index < box->offset[i] + box->sizes[i];
      }
    }
    if (inside) elements.push_back(element);
  }
  return elements;
}

TEST(PartsTest, NumElements) {
  EXPECT_EQ(NumElements(Sizes{}).value(), 1);
  EXPECT_EQ(NumElements(Sizes{2, 3}).value(), 6);
  EXPECT_EQ(NumElements(Sizes{2, 0, 3}).value(), 0);
  EXPECT_EQ(NumElements(Sizes{kMax}).value(), kMax);
  for (const Sizes& shape : {Sizes{-1}, Sizes{kMax, 2}, Sizes{kMax, 2, 0}, Sizes{0, -1}}) {
    EXPECT_FALSE(NumElements(shape).ok()) << ShapeText(shape);
  }
}

TEST(PartsTest, InsideTheWhole) {
  for (const Shard& shard : {Shard{{6, 4}, Box{{2, 1}, {4, 3}}}, Shard{{6, 4}, Box{{6, 4}, {0, 0}}},
                             Shard{{6, 4}, FlatRange{0, 24}}, Shard{{6, 4}, FlatRange{24, 24}},
                             Shard{{}, Box{{}, {}}}, Shard{{}, FlatRange{0, 1}}, Shard{{6, 4}}}) {
    EXPECT_TRUE(CheckPart(shard).ok()) << ToString(shard);
  }
  ExpectInvalid(CheckPart({{6, 4}, Box{{2, 2}, {4, 3}}}), "box [4, 3] at [2, 2] of [6, 4]");
  ExpectInvalid(CheckPart({{6, 4}, Box{{2, 2}, {4, 3}}}), "dimension 1");
  ExpectInvalid(CheckPart({{6, 4}, FlatRange{5, 25}}), "elements [5, 25) of [6, 4]");
  for (const Shard& shard :
       {Shard{{6, 4}, Box{{-1, 0}, {1, 1}}}, Shard{{6, 4}, Box{{0, 0}, {-1, 1}}},
        Shard{{6, 4}, Box{{7, 0}, {0, 0}}}, Shard{{6, 4}, Box{{2}, {2}}},
        Shard{{6, 4}, Box{{2, 0}, {2}}}, Shard{{6, 4}, Box{{0, 1}, {1, kMax}}},
        Shard{{6, 4}, FlatRange{-1, 3}}, Shard{{6, 4}, FlatRange{4, 3}},
        Shard{{6, 4}, FlatRange{25, 25}}, Shard{{6, -4}, FlatRange{0, 0}}}) {
    EXPECT_FALSE(CheckPart(shard).ok()) << ToString(shard);
  }
}

TEST(PartsTest, TheLocalTensorHoldsThePart) {
  EXPECT_TRUE(CheckLocal({{6, 4}}, {6, 4}).ok());
  EXPECT_TRUE(CheckLocal({{6, 4}, Box{{2, 1}, {2, 3}}}, {2, 3}).ok());
  EXPECT_TRUE(CheckLocal({{6, 4}, FlatRange{5, 13}}, {8}).ok());
  EXPECT_TRUE(CheckLocal({{6, 4}, FlatRange{5, 5}}, {0}).ok());
  ExpectInvalid(CheckLocal({{6, 4}, FlatRange{5, 13}}, {2, 4}), "shape [2, 4] instead of [8]");
  ExpectInvalid(CheckLocal({{6, 4}, FlatRange{5, 13}}, {7}), "[7]");
  ExpectInvalid(CheckLocal({{6, 4}, Box{{2, 1}, {2, 3}}}, {3, 2}), "[3, 2]");
  ExpectInvalid(CheckLocal({{6, 4}}, {24}), "[24]");
  ExpectInvalid(CheckLocal({{6, 4}, FlatRange{20, 28}}, {8}), "24 elements");
}

// Every range of some shapes: the boxes hold its elements, each once and in order.
TEST(PartsTest, BoxesOfARange) {
  for (const Sizes& shape : {Sizes{}, Sizes{7}, Sizes{3, 4}, Sizes{2, 3, 4}, Sizes{1, 5, 1, 3},
                             Sizes{2, 2, 2, 2}, Sizes{0, 3}}) {
    const int64_t count = NumElements(shape).value();
    for (int64_t begin = 0; begin <= count; ++begin) {
      for (int64_t end = begin; end <= count; ++end) {
        const std::vector<Box> boxes = BoxesOf(shape, {begin, end});
        EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size()));
        std::vector<int64_t> elements;
        for (const Box& box : boxes) {
          const Shard shard{shape, box};
          const std::vector<int64_t> some = Elements(shard);
          ASSERT_TRUE(CheckPart(shard).ok());
          ASSERT_EQ(FlatRangeOf(shard), (FlatRange{some.front(), some.back() + 1}));
          elements.insert(elements.end(), some.begin(), some.end());
        }
        ASSERT_EQ(elements, Elements({shape, FlatRange{begin, end}}))
            << ShapeText(shape) << " " << begin << " " << end;
      }
    }
  }
}

// Every box of a shape: a range exactly if its elements are consecutive.
TEST(PartsTest, RangeOfABox) {
  const Sizes shape = {3, 2, 3};
  for (int64_t code = 0; code < 3 * 2 * 3 * 3 * 2 * 3; ++code) {
    int64_t rest = code;
    Box box{{0, 0, 0}, {0, 0, 0}};
    bool inside = true;
    for (size_t i = 0; i < 3; ++i) {
      box.offset[i] = rest % shape[i];
      rest /= shape[i];
      box.sizes[i] = 1 + rest % shape[i];
      rest /= shape[i];
      inside = inside && box.offset[i] + box.sizes[i] <= shape[i];
    }
    if (!inside) continue;
    const Shard shard{shape, box};
    const std::vector<int64_t> elements = Elements(shard);
    const int64_t length = elements.back() + 1 - elements.front();
    const std::optional<FlatRange> range = FlatRangeOf(shard);
    EXPECT_EQ(range.has_value(), length == static_cast<int64_t>(elements.size()))
        << ToString(shard);
    if (range) {
      EXPECT_EQ(*range, (FlatRange{elements.front(), elements.back() + 1})) << ToString(shard);
    }
  }
}

TEST(PartsTest, RangesCover) {
  const auto cover = [](const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::vector<RankShard> shards;
    for (const auto& [begin, end] : ranges) {
      shards.push_back({static_cast<int>(shards.size()), {{6, 4}, FlatRange{begin, end}}});
    }
    return CheckCover(shards);
  };
  EXPECT_TRUE(cover({{0, 24}}).ok());
  EXPECT_TRUE(cover({{5, 13}, {0, 5}, {13, 24}}).ok());
  EXPECT_TRUE(cover({{0, 12}, {3, 3}, {12, 24}, {24, 24}}).ok());
  ExpectInvalid(cover({{0, 12}, {13, 24}}), "no rank has elements [12, 13) of [6, 4]");
  ExpectInvalid(cover({{1, 24}}), "elements [0, 1)");
  ExpectInvalid(cover({{0, 23}}), "elements [23, 24)");
  ExpectInvalid(cover({{0, 0}}), "elements [0, 24)");
  ExpectInvalid(cover({{0, 12}, {11, 24}}), "rank 0 has elements [0, 12) of [6, 4] and rank 1 has");
  ExpectInvalid(cover({{0, 24}, {0, 24}}), "overlap");
  ExpectInvalid(cover({{0, 24}, {12, 25}}), "of rank 1");
  ExpectInvalid(CheckCover({}), "no rank");
  ExpectInvalid(CheckCover({{0, {{6, 4}, FlatRange{0, 12}}}, {1, {{24}, FlatRange{12, 24}}}}),
                "[6, 4] on rank 0 and [24] on rank 1");
  EXPECT_TRUE(CheckCover({{0, {{0, 3}, FlatRange{0, 0}}}}).ok());
  EXPECT_TRUE(CheckCover({{0, {{}, FlatRange{0, 1}}}, {1, {{}, FlatRange{1, 1}}}}).ok());
}

TEST(PartsTest, BoxesAndRangesCover) {
  const Sizes shape = {4, 6};
  const RankShard left{0, {shape, Box{{0, 0}, {4, 2}}}};
  const RankShard right{1, {shape, Box{{0, 2}, {4, 4}}}};
  const RankShard top_right{1, {shape, Box{{0, 2}, {2, 4}}}};
  const RankShard bottom_right{2, {shape, Box{{2, 2}, {2, 4}}}};
  const RankShard top_left{0, {shape, Box{{0, 0}, {2, 2}}}};
  const RankShard bottom{3, {shape, FlatRange{12, 24}}};
  EXPECT_TRUE(CheckCover({left, right}).ok());
  EXPECT_TRUE(CheckCover({bottom_right, left, top_right}).ok());
  EXPECT_TRUE(CheckCover({top_left, top_right, bottom}).ok());
  EXPECT_TRUE(CheckCover({left, {5, {shape, Box{{0, 0}, {0, 6}}}}, right}).ok());
  ExpectInvalid(CheckCover({left, top_right}), "no rank has 8 of the 24 elements of [4, 6]");
  ExpectInvalid(CheckCover({left, right, bottom_right}),
                "rank 1 has box [4, 4] at [0, 2] of [4, 6] and rank 2 has");
  ExpectInvalid(CheckCover({left, top_right, bottom}), "rank 0");
  ExpectInvalid(CheckCover({left, right, {2, {shape}}}), "overlap");
  // These parts have as many elements as the whole, and yet do not cover it.
  ExpectInvalid(CheckCover({left, left, left}), "overlap");
}

// Random cuts cover; with one element moved they do not.
TEST(PartsTest, RandomCuts) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    Sizes shape;
    for (int dimension = 0; dimension < 3; ++dimension) shape.push_back(1 + random() % 5);
    std::vector<RankShard> shards;
    const int64_t middle = static_cast<int64_t>(random() % (shape[0] + 1));
    const int64_t plane = shape[1] * shape[2];
    const int64_t column = static_cast<int64_t>(random() % (shape[2] + 1));
    shards.push_back({0, {shape, Box{{0, 0, 0}, {middle, shape[1], column}}}});
    shards.push_back({1, {shape, Box{{0, 0, column}, {middle, shape[1], shape[2] - column}}}});
    const int64_t elements = shape[0] * plane;
    const int64_t cut =
        middle * plane + static_cast<int64_t>(random() % (elements - middle * plane + 1));
    shards.push_back({2, {shape, FlatRange{middle * plane, cut}}});
    shards.push_back({3, {shape, FlatRange{cut, elements}}});
    EXPECT_TRUE(CheckCover(shards).ok()) << CheckCover(shards);
    EXPECT_TRUE(CheckCover({shards[2], shards[0], shards[3], shards[1]}).ok());
    for (RankShard& shard : shards) {
      auto* range = std::get_if<FlatRange>(&shard.shard.part);
      if (range == nullptr || range->begin == range->end) continue;
      ++range->begin;
      EXPECT_FALSE(CheckCover(shards).ok());
      --range->begin;
    }
  }
}

}  // namespace
}  // namespace ddp::checkpoint
