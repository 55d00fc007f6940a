#include "checkpoint/cover.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/match.h"
#include "base/coordinator_testing.h"

namespace ddp::checkpoint {
namespace {

TEST(CoverTest, PartsOfAllRanks) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const int rank = ranks.rank();
    std::map<std::string, Shard> mine;
    EXPECT_TRUE(CheckCoverage(mine, ranks).ok());
    mine["a"] = {{2, 12}, FlatRange{rank * 8, rank * 8 + 8}};
    mine["b/c"] = {{3, 2}, Box{{rank, 0}, {1, 2}}};
    if (rank == 2) mine["on one rank"] = {{5}};
    EXPECT_TRUE(CheckCoverage(mine, ranks).ok()) << CheckCoverage(mine, ranks);
  });
}

TEST(CoverTest, AnErrorIsEverybodys) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const int rank = ranks.rank();
    std::map<std::string, Shard> mine;
    mine["a"] = {{2, 12}, FlatRange{rank * 8, rank * 8 + 8}};
    mine["b/c"] = {{3, 2}, Box{{rank == 1 ? 0 : rank, 0}, {1, 2}}};
    EXPECT_EQ(CheckCoverage(mine, ranks),
              absl::InvalidArgumentError("rank 0: shards of 'b/c': rank 0 has box [1, 2] at [0, 0] "
                                         "of [3, 2] and rank 1 has box [1, 2] at [0, 0] of [3, 2], "
                                         "which overlap"));
    mine.erase("b/c");
    if (rank == 2) mine.clear();
    EXPECT_EQ(CheckCoverage(mine, ranks),
              absl::InvalidArgumentError(
                  "rank 0: shards of 'a': no rank has elements [16, 24) of [2, 12]"));
  });
}

TEST(CoverTest, AlonePartsAreTheWholeToo) {
  const SingleRank alone;
  EXPECT_TRUE(CheckCoverage({{"a", {{4}, FlatRange{0, 4}}}}, alone).ok());
  EXPECT_FALSE(CheckCoverage({{"a", {{4}, FlatRange{0, 3}}}}, alone).ok());
}

}  // namespace
}  // namespace ddp::checkpoint
