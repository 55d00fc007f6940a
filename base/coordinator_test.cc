#include "base/coordinator.h"

#include "base/coordinator_testing.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(SingleRankTest, AgreesWithItself) {
  const SingleRank alone;
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.Agree(absl::DataLossError("x")), absl::DataLossError("x"));
  EXPECT_EQ(*alone.Broadcast(std::string("a")), "a");
  EXPECT_EQ(*alone.AllGather("b"), std::vector<std::string>{"b"});
}

TEST(CoordinatorTestingTest, TheLowestFailingRanksErrorIsEverybodys) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    const absl::Status agreed =
        ranks.Agree(ranks.rank() == 0 ? absl::OkStatus() : absl::DataLossError("damaged"));
    EXPECT_EQ(agreed, absl::DataLossError("rank 1: damaged"));
  });
}

TEST(CoordinatorTestingTest, BroadcastAndAllGather) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const std::string mine(ranks.rank(), 'x');
    EXPECT_EQ(*ranks.AllGather(mine), (std::vector<std::string>{"", "x", "xx"}));
    EXPECT_EQ(*ranks.Broadcast(ranks.rank() == 0 ? "zero" : "ignored"), "zero");
    const absl::StatusOr<std::string> failed = ranks.Broadcast(
        ranks.rank() == 0 ? absl::StatusOr<std::string>(absl::NotFoundError("no file")) : mine);
    EXPECT_EQ(failed.status(), absl::NotFoundError("rank 0: no file"));
  });
}

TEST(CoordinatorTestingTest, ARankThatHasLeftIsNamed) {
  RunCoordinatedRanks(2, [](const Coordinator& ranks) {
    if (ranks.rank() == 1) return;
    const absl::Status status = ranks.Agree(absl::OkStatus());
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(status.message(), "rank 0 timed out waiting for rank 1");
  });
}

}  // namespace
}  // namespace ddp
