#include "checkpoint/sharded/spread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace ddp::checkpoint::sharded {
namespace {

ReplicatedTensor Floats(std::vector<int64_t> shape, std::vector<int> holders) {
  uint64_t bytes = 4;
  for (int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  return {std::move(shape), bytes, std::move(holders)};
}

uint64_t BytesOf(const std::vector<Share>& shares) {
  uint64_t bytes = 0;
  for (const Share& share : shares) {
    uint64_t elements = 1;
    for (int64_t size : share.box.sizes) elements *= static_cast<uint64_t>(size);
    bytes += 4 * elements;
  }
  return bytes;
}

TEST(SpreadTest, EachElementIsWrittenOnceAndAllWriteAsMuch) {
  const std::vector<int> all = {0, 1, 2};
  std::vector<ReplicatedTensor> tensors = {Floats({}, all), Floats({0, 3}, all),
                                           Floats({1000, 4001}, all), Floats({1, 4000000}, all)};
  for (int64_t i = 1; i < 40; ++i) tensors.push_back(Floats({i * 17, 100}, all));
  const auto shares = Spread(tensors, {4'000'000, 0, 0});
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<RankShard> parts;
    for (int rank = 0; rank < 3; ++rank) {
      for (const Share& share : shares[static_cast<size_t>(rank)]) {
        if (share.tensor == i) parts.push_back({rank, {tensors[i].shape, share.box}});
      }
    }
    EXPECT_TRUE(CheckCover(parts).ok()) << i << ": " << CheckCover(parts);
    EXPECT_EQ(parts.size(), i == 2 ? 3u : 1u) << i;
  }
  const std::vector<uint64_t> loads = {4'000'000 + BytesOf(shares[0]), BytesOf(shares[1]),
                                       BytesOf(shares[2])};
  // The tensor of one row cannot be cut, and decides.
  EXPECT_LE(*std::max_element(loads.begin(), loads.end()), 16'000'000 + 5'400'000u);
}

TEST(SpreadTest, OnlyRanksThatHaveItWriteIt) {
  const auto shares = Spread({Floats({3000000}, {0}), Floats({3000000}, {0, 2})}, {0, 0, 0});
  EXPECT_EQ(shares[0].size(), 2u);
  EXPECT_TRUE(shares[1].empty());
  EXPECT_EQ(shares[2].size(), 1u);
}

}  // namespace
}  // namespace ddp::checkpoint::sharded
