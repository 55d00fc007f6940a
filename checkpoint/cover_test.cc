#include "checkpoint/cover.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/coordinator_testing.h"

namespace ddp::checkpoint {
namespace {

TEST(CoverTest, PartsOfAllRanks) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const int rank = ranks.rank();
    std::map<std::string, TensorParts> mine;
    EXPECT_TRUE(CheckCoverage(mine, ranks).ok());
    mine["a"] = {"float32", {2, 12}, {}, {FlatRange{rank * 8, rank * 8 + 8}}};
    mine["b/c"] = {"float32", {3, 2}, {}, {Box{{rank, 0}, {1, 2}}}};
    if (rank == 2) mine["on one rank"] = {"int64", {5}, {}, {Whole{}}};
    EXPECT_TRUE(CheckCoverage(mine, ranks).ok()) << CheckCoverage(mine, ranks);
  });
}

TEST(CoverTest, AnErrorIsEverybodys) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const int rank = ranks.rank();
    std::map<std::string, TensorParts> mine;
    mine["a"] = {"float32", {2, 12}, {}, {FlatRange{rank * 8, rank * 8 + 8}}};
    mine["b/c"] = {"float32", {3, 2}, {}, {Box{{rank == 1 ? 0 : rank, 0}, {1, 2}}}};
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
  const auto covers = [&](std::vector<Part> parts) {
    return CheckCoverage({{"a", {"int8", {4}, {}, std::move(parts)}}}, alone).ok();
  };
  EXPECT_TRUE(covers({FlatRange{0, 4}}));
  EXPECT_FALSE(covers({FlatRange{0, 3}}));
  EXPECT_FALSE(covers({}));
}

// As ZeRO has them: a rank owns pieces of several blocks, another rank none.
TEST(CoverTest, SeveralPartsOfOneRank) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const int rank = ranks.rank();
    const auto mine = [&](std::vector<Part> of_rank_0) {
      std::map<std::string, TensorParts> parts;
      parts["a"] = {"float32", {2, 3, 4, 4}, {0, 2, 3, 1}, {}};
      if (rank == 0) parts["a"].parts = std::move(of_rank_0);
      if (rank == 2) parts["a"].parts = {FlatRange{10, 30}, FlatRange{40, 96}};
      return parts;
    };
    absl::Status status = CheckCoverage(mine({FlatRange{0, 10}, FlatRange{30, 40}}), ranks);
    EXPECT_TRUE(status.ok()) << status;
    status = CheckCoverage(mine({FlatRange{0, 10}, FlatRange{31, 40}}), ranks);
    EXPECT_TRUE(absl::StrContains(status.message(), "no rank has elements [30, 31)")) << status;
    status = CheckCoverage(mine({FlatRange{0, 10}, FlatRange{9, 10}, FlatRange{30, 40}}), ranks);
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 0 has elements [9, 10) of")) << status;
  });
}

TEST(CoverTest, AllRanksSpeakOfOneTensor) {
  RunCoordinatedRanks(2, [](const Coordinator& ranks) {
    const bool last = ranks.rank() == 1;
    const auto refused = [&](TensorParts of_last, absl::string_view what) {
      const TensorParts first = {"float32", {6, 4}, {1, 0}, {FlatRange{0, 24}}};
      const absl::Status status = CheckCoverage({{"a", last ? of_last : first}}, ranks);
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    };
    refused({"float64", {6, 4}, {1, 0}, {}}, "'a': float32 on rank 0 and float64 on rank 1");
    refused({"float32", {4, 6}, {1, 0}, {}}, "[6, 4] on rank 0 and [4, 6] on rank 1");
    refused({"float32", {6, 4}, {}, {}}, "order of dimensions is [1, 0] on rank 0 and []");
    refused({"float32", {6, 4}, {1, 1}, {}}, "[1, 1] is no order");
  });
}

}  // namespace
}  // namespace ddp::checkpoint
