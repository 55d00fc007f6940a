#include "ddp/zero/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace ddp::zero {
namespace {

int64_t Units(const Partition& partition, int64_t numel) {
  return (numel + partition.unit() - 1) / partition.unit();
}

// Every element of every tensor has one owner, and its place in the shard is its block's.
void CheckCover(const Partition& partition) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> ranges(partition.num_tensors());
  for (int rank = 0; rank < partition.world_size(); ++rank) {
    std::vector<std::pair<int64_t, int64_t>> in_shard;
    int64_t owned = 0;
    for (const Piece& piece : partition.Pieces(rank)) {
      ASSERT_LT(piece.begin, piece.end);
      ASSERT_EQ(piece.begin % partition.unit(), 0);
      ASSERT_TRUE(piece.end % partition.unit() == 0 || piece.end == partition.numel(piece.tensor));
      ranges[piece.tensor].emplace_back(piece.begin, piece.end);
      in_shard.emplace_back(piece.shard_begin, piece.shard_begin + piece.size());
      owned += piece.size();
    }
    ASSERT_EQ(owned, partition.OwnedElements(rank));
    std::sort(in_shard.begin(), in_shard.end());
    for (size_t i = 0; i < in_shard.size(); ++i) {
      ASSERT_GE(in_shard[i].first, i == 0 ? 0 : in_shard[i - 1].second);
      ASSERT_LE(in_shard[i].second, partition.shard_size());
    }
  }
  for (int tensor = 0; tensor < partition.num_tensors(); ++tensor) {
    std::sort(ranges[tensor].begin(), ranges[tensor].end());
    int64_t at = 0;
    for (const auto& [begin, end] : ranges[tensor]) {
      ASSERT_EQ(begin, at) << "tensor " << tensor;
      at = end;
    }
    ASSERT_EQ(at, partition.numel(tensor)) << "tensor " << tensor;
  }
}

// reduce_blocks() move each owned element to where Pieces says that it is in the shard.
void CheckReduceBlocks(const Partition& partition, int64_t max_block_bytes, int64_t element_bytes) {
  for (const Block& block : partition.reduce_blocks()) {
    const int64_t bytes = block.part * partition.world_size() * element_bytes;
    ASSERT_LE(bytes, std::max(max_block_bytes, Partition::kUnitBytes * partition.world_size()));
  }
  for (int rank = 0; rank < partition.world_size(); ++rank) {
    for (const Piece& piece : partition.Pieces(rank)) {
      const int64_t begin = partition.offset(piece.tensor) + piece.begin;
      int64_t found = 0;
      for (const Block& block : partition.reduce_blocks()) {
        const Overlap overlap = OverlapOf(block, rank, begin, begin + piece.size());
        if (overlap.begin >= overlap.end) continue;
        found += overlap.end - overlap.begin;
        ASSERT_EQ(block.shard_begin + overlap.at, piece.shard_begin + overlap.begin - begin);
      }
      ASSERT_EQ(found, piece.size());
    }
  }
}

TEST(PartitionTest, TheMlpOfTheReferenceProgram) {
  const Partition partition =
      Partition::Flat({401408, 512, 262144, 512, 5120, 10}, 4, /*world_size=*/2);
  EXPECT_EQ(partition.OwnedElements(0), 334'864);
  EXPECT_EQ(partition.OwnedElements(1), 334'842);
  EXPECT_EQ(partition.blocks().size(), 2u);
}

TEST(PartitionTest, OneRankOwnsAllInOnePiecePerTensor) {
  const Partition partition = Partition::Flat({5, 0, 100}, 4, 1);
  const std::vector<Piece> expected = {{.tensor = 0, .begin = 0, .end = 5, .shard_begin = 0},
                                       {.tensor = 2, .begin = 0, .end = 100, .shard_begin = 16}};
  EXPECT_EQ(partition.Pieces(0), expected);
}

TEST(PartitionTest, MoreRanksThanUnits) {
  const Partition partition = Partition::Flat({17}, 4, 8);
  EXPECT_EQ(partition.OwnedElements(0), 16);
  EXPECT_EQ(partition.OwnedElements(1), 1);
  for (int rank = 2; rank < 8; ++rank) EXPECT_TRUE(partition.Pieces(rank).empty());
  CheckCover(partition);
}

TEST(PartitionTest, Nothing) {
  EXPECT_EQ(Partition::Flat({}, 4, 3).storage_size(), 0);
  EXPECT_TRUE(Partition::Flat({0, 0}, 4, 3).blocks().empty());
  EXPECT_TRUE(Partition::ByTensor({0, 0}, 4, 3).blocks().empty());
}

TEST(PartitionTest, RandomTensors) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const int64_t limits[] = {0, 1, 100'000, 1 << 20};
    const int64_t limit = limits[random() % 4];
    std::vector<int64_t> numels(random() % 12);
    for (int64_t& numel : numels) {
      const int64_t most = limit != 1 && random() % 3 == 0 ? 1'000'000 : 200;
      numel = static_cast<int64_t>(random() % (most + 1));
    }
    const int64_t element_bytes = int64_t{1} << random() % 5;
    const int world_size = 1 + static_cast<int>(random() % 9);
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << world_size << " ranks, "
                                    << element_bytes << " bytes, blocks of " << limit);

    const Partition flat = Partition::Flat(numels, element_bytes, world_size, limit);
    CheckCover(flat);
    if (limit > 0) CheckReduceBlocks(flat, limit, element_bytes);
    int64_t most = 0, least = INT64_MAX;
    for (int rank = 0; rank < world_size; ++rank) {
      int64_t units = 0;
      for (const Piece& piece : flat.Pieces(rank)) {
        units += Units(flat, piece.end) - piece.begin / flat.unit();
      }
      most = std::max(most, units);
      least = std::min(least, units);
    }
    EXPECT_LE(most - least, 1);

    const Partition whole = Partition::ByTensor(numels, element_bytes, world_size, limit);
    CheckCover(whole);
    if (limit > 0) CheckReduceBlocks(whole, limit, element_bytes);
    int64_t all = 0, largest = 0;
    for (int64_t numel : numels) {
      all += Units(whole, numel);
      largest = std::max(largest, Units(whole, numel));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      for (const Piece& piece : whole.Pieces(rank)) {
        ASSERT_EQ(piece.size(), whole.numel(piece.tensor)) << "only whole tensors";
      }
    }
    // Graham's bound for lists: an even share and one more tensor.
    EXPECT_LE(whole.shard_size() / whole.unit(), all / world_size + largest);
  }
}

}  // namespace
}  // namespace ddp::zero
