#include "base/coordinator.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/coordinator_testing.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/same_options.h"
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

struct Inner {
  int64_t port = 0;
  std::string host = "";
};
constexpr auto OptionsOf(const Inner&) {
  return Options(Option("port", &Inner::port, "a port"),
                 Option("host", &Inner::host, "a host").OnAllRanksOrNone());
}

struct Fit {
  double lr = 0.1;
  int64_t seed = 0;
  std::string folder = "";
  std::vector<std::string> files = {};
  std::string interface = "";
  Inner inner = {};
};
constexpr auto OptionsOf(const Fit&) {
  return Options(Option("lr", &Fit::lr, "learning rate"), Option("seed", &Fit::seed, "a seed"),
                 Option("folder", &Fit::folder, "a folder").OnAllRanksOrNone(),
                 Option("files", &Fit::files, "some files").OnAllRanksOrNone(),
                 Option("interface", &Fit::interface, "of the network").MayDiffer(),
                 Nested("inner", &Fit::inner, "of each machine").MayDiffer());
}

// What ranks with these options get, each its own; nullopt: all may go on.
std::optional<OptionProblem> ProblemOfRanks(std::vector<Fit> ranks) {
  std::vector<absl::Status> statuses(ranks.size());
  RunCoordinatedRanks(static_cast<int>(ranks.size()), [&](const Coordinator& coordinator) {
    const int rank = coordinator.rank();
    statuses[rank] = RequireSameOptions(coordinator, ListOptions(ranks[rank]));
  });
  for (const absl::Status& status : statuses) EXPECT_EQ(status, statuses[0]);
  EXPECT_EQ(statuses[0].ok(), !ProblemOf(statuses[0]).has_value()) << statuses[0];
  return ProblemOf(statuses[0]);
}

TEST(SameOptionsTest, AnOptionHasOneValueUnlessItSaysOtherwise) {
  EXPECT_FALSE(ProblemOfRanks({{}, {}, {}}));
  const auto problem = ProblemOfRanks({{}, {.lr = 0.2}, {}, {}, {.lr = 0.3}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->path, "lr");
  EXPECT_EQ(problem->value, "0.1");
  EXPECT_EQ(problem->problem,
            "is not the same on all ranks: ranks 0, 2, 3 have 0.1, rank 1 has 0.2, rank 4 has 0.3");
}

TEST(SameOptionsTest, AllThatDifferAreNamed) {
  const auto problem = ProblemOfRanks({{}, {.lr = 0.2, .seed = 1, .folder = "a"}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->problem,
            "is not the same on all ranks: rank 0 has 0.1, rank 1 has 0.2; ranks also differ in "
            "seed, folder");
}

TEST(SameOptionsTest, APathIsSetOnAllRanksOrNone) {
  EXPECT_FALSE(ProblemOfRanks({{.folder = "a"}, {.folder = "b"}, {.folder = "c"}}));
  auto problem = ProblemOfRanks({{}, {.folder = "b"}, {}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->path, "folder");
  EXPECT_EQ(problem->problem,
            "must be set on all ranks or on none: ranks 0, 2 have none, rank 1 has b");
  // The ranks look for the newest checkpoint together; a path each reads by itself.
  problem = ProblemOfRanks({{.folder = "auto"}, {.folder = "b"}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->problem,
            "must be auto on all ranks or on none: rank 0 has auto, rank 1 has b");
  problem = ProblemOfRanks({{.folder = "b"}, {.folder = "best"}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->problem,
            "must be best on all ranks or on none: rank 0 has b, rank 1 has best");
  EXPECT_FALSE(ProblemOfRanks({{.files = {"a"}}, {.files = {"b", "c"}}}));
  problem = ProblemOfRanks({{.files = {"a"}}, {}});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->path, "files");
}

TEST(SameOptionsTest, WhatBelongsToARankMayDiffer) {
  EXPECT_FALSE(ProblemOfRanks({{.interface = "eth0"}, {.inner = {.port = 5, .host = "h"}}}));
}

TEST(SameOptionsTest, ManyRanksAreARange) {
  std::vector<Fit> ranks(600);
  ranks[77].lr = 1;
  std::vector<std::string> texts;
  for (Fit& rank : ranks) texts.push_back(TextOfOptions(ListOptions(rank)));
  EXPECT_EQ(ProblemOf(DifferenceOfOptions(texts))->problem,
            "is not the same on all ranks: ranks 0-76, 78-599 have 0.1, rank 77 has 1");
  for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank].lr = static_cast<double>(rank);
  texts.clear();
  for (Fit& rank : ranks) texts.push_back(TextOfOptions(ListOptions(rank)));
  EXPECT_LT(DifferenceOfOptions(texts).message().size(), 200);
}

TEST(SameOptionsTest, RanksOfAnotherProgramLackOptions) {
  Fit fit;
  Inner inner;
  const std::vector<std::string> texts = {TextOfOptions(ListOptions(inner)),
                                          TextOfOptions(ListOptions(fit))};
  EXPECT_EQ(ProblemOf(DifferenceOfOptions(texts))->path, "port");
  EXPECT_EQ(ProblemOf(DifferenceOfOptions(texts))->problem,
            "is not the same on all ranks: rank 0 has 0, rank 1 has no such option; ranks also "
            "differ in host, lr, seed, folder, files");
}

}  // namespace
}  // namespace ddp
