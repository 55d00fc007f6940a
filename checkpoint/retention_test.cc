#include "checkpoint/retention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

using Files = std::vector<std::string>;
using Metrics = std::map<std::string, double>;

const absl::Time kStart = absl::FromUnixSeconds(1'700'000'000);

// epoch_N, saved N hours after the start, without metrics.
Candidate Epoch(int64_t epoch, std::optional<Metrics> metrics = Metrics()) {
  return {.name = *ParseName(EpochName(epoch)),
          .file = EpochName(epoch),
          .time = kStart + absl::Hours(epoch),
          .metrics = std::move(metrics)};
}

Candidate Named(const std::string& name) {
  return {.name = *ParseName(name), .file = name, .time = kStart, .metrics = Metrics()};
}

std::vector<Candidate> Epochs(int64_t first, int64_t last) {
  std::vector<Candidate> candidates;
  for (int64_t epoch = first; epoch <= last; ++epoch) candidates.push_back(Epoch(epoch));
  return candidates;
}

// What is left, oldest first.
Files Kept(std::vector<Candidate> candidates, const RetentionRules& rules,
           const std::string& saved = "") {
  const Files deleted = ToDelete(candidates, rules, saved);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.name < b.name; });
  Files kept;
  for (const Candidate& candidate : candidates) {
    if (std::find(deleted.begin(), deleted.end(), candidate.file) == deleted.end()) {
      kept.push_back(candidate.file);
    }
  }
  return kept;
}

TEST(RetentionTest, WithoutARuleAllAreKept) {
  EXPECT_EQ(ToDelete(Epochs(1, 9), {}, "epoch_9"), Files());
  EXPECT_EQ(ToDelete({}, {.last = 1}, "epoch_9"), Files());
}

TEST(RetentionTest, TheNewestByNumberAndOldestDeletedFirst) {
  std::vector<Candidate> candidates = Epochs(8, 11);
  std::reverse(candidates.begin(), candidates.end());
  EXPECT_EQ(ToDelete(candidates, {.last = 2}, "epoch_11"), (Files{"epoch_8", "epoch_9"}));
  EXPECT_EQ(Kept(candidates, {.last = 9}).size(), 4u);
}

TEST(RetentionTest, EveryKthByTheNumberThatTheNameEndsIn) {
  EXPECT_EQ(Kept(Epochs(1, 11), {.every = 5}), (Files{"epoch_5", "epoch_10", "epoch_11"}));
  EXPECT_EQ(Kept({Named("step_100"), Named("step_150"), Named("step_200"), Named("step_210")},
                 {.every = 100}),
            (Files{"step_100", "step_200", "step_210"}));
  EXPECT_EQ(Kept({Named("epoch_0_step_100"), Named("epoch_0_step_150"), Named("epoch_3"),
                  Named("epoch_3_step_400"), Named("epoch_3_step_401")},
                 {.every = 100}),
            (Files{"epoch_0_step_100", "epoch_3_step_400", "epoch_3_step_401"}));
}

TEST(RetentionTest, OnePerSoManyHours) {
  EXPECT_EQ(Kept(Epochs(1, 8), {.hours = 3}), (Files{"epoch_1", "epoch_4", "epoch_7", "epoch_8"}));
  EXPECT_EQ(Kept(Epochs(1, 3), {.hours = 0.5}).size(), 3u);
  // Files of a copied folder may all have one time.
  std::vector<Candidate> copied = Epochs(1, 4);
  for (Candidate& candidate : copied) candidate.time = kStart;
  EXPECT_EQ(Kept(copied, {.hours = 1}), (Files{"epoch_1", "epoch_4"}));
  // A clock that was set back by two days.
  std::vector<Candidate> back = Epochs(1, 6);
  for (size_t i = 3; i < 6; ++i) back[i].time -= absl::Hours(48);
  EXPECT_EQ(Kept(back, {.hours = 3}), (Files{"epoch_1", "epoch_4", "epoch_6"}));
}

// A rule that chose another one after each deletion would keep nothing in the end.
TEST(RetentionTest, WhatIsKeptStaysKept) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const RetentionRules rules{.last = static_cast<int64_t>(random() % 3),
                               .every = static_cast<int64_t>(random() % 5),
                               .hours = static_cast<double>(random() % 6),
                               .best = BestMetric{.metric = "m", .count = 2}};
    std::vector<Candidate> present;
    std::vector<Candidate> all;
    for (int64_t epoch = 1; epoch <= 40; ++epoch) {
      Candidate saved = Epoch(epoch, Metrics{{"m", static_cast<double>(random() % 10)}});
      saved.time += absl::Minutes(static_cast<int64_t>(random() % 50));
      present.push_back(saved);
      all.push_back(saved);
      const Files deleted = ToDelete(present, rules, saved.file);
      std::erase_if(present, [&](const Candidate& candidate) {
        return std::find(deleted.begin(), deleted.end(), candidate.file) != deleted.end();
      });
    }
    // Deleting at each save leaves what deleting once at the end does.
    Files left;
    for (const Candidate& candidate : present) left.push_back(candidate.file);
    EXPECT_EQ(left, Kept(all, rules, EpochName(40))) << round;
  }
}

TEST(RetentionTest, TheBestOfAMetric) {
  std::vector<Candidate> candidates;
  for (const double value : {0.5, 0.9, 0.7, 0.9, 0.1, 0.2}) {
    candidates.push_back(
        Epoch(static_cast<int64_t>(candidates.size()) + 1, Metrics{{"test/accuracy", value}}));
  }
  const auto kept = [&](const std::string& best) {
    return Kept(candidates, {.best = ParseBestMetric(best).value()});
  };
  // Of equal ones the first: a later one is no improvement.
  EXPECT_EQ(kept("test/accuracy:max"), (Files{"epoch_2", "epoch_6"}));
  EXPECT_EQ(kept("test/accuracy:max:3"), (Files{"epoch_2", "epoch_3", "epoch_4", "epoch_6"}));
  EXPECT_EQ(kept("test/accuracy:min"), (Files{"epoch_5", "epoch_6"}));
  EXPECT_EQ(kept("no such metric:min"), Files{"epoch_6"});

  // No value is never the best. Metrics that are not known might be: these are kept.
  candidates[1].metrics->at("test/accuracy") = std::nan("");
  candidates[0].metrics = std::nullopt;
  candidates[2].metrics = Metrics();
  EXPECT_EQ(kept("test/accuracy:max"), (Files{"epoch_1", "epoch_4", "epoch_6"}));
  EXPECT_EQ(Kept(candidates, {.last = 2}), (Files{"epoch_5", "epoch_6"}));
  const std::vector<Candidate> best =
      BestFirst(candidates, {.metric = "test/accuracy", .greatest = false});
  ASSERT_EQ(best.size(), 3u);
  EXPECT_EQ(best[0].file, "epoch_5");
}

TEST(RetentionTest, InfinitiesAreValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<Candidate> best =
      BestFirst({Epoch(1, Metrics{{"loss", infinity}}), Epoch(2, Metrics{{"loss", 3}}),
                 Epoch(3, Metrics{{"loss", -infinity}})},
                {.metric = "loss", .greatest = false});
  EXPECT_EQ(best[0].file, "epoch_3");
  EXPECT_EQ(best[2].file, "epoch_1");
}

TEST(RetentionTest, NeverDeleted) {
  std::vector<Candidate> candidates = Epochs(1, 9);
  candidates[1].pinned = true;
  candidates[3].verified = true;
  candidates[4].verified = true;
  EXPECT_EQ(Kept(candidates, {.last = 2}, "epoch_1"),
            (Files{"epoch_1", "epoch_2", "epoch_5", "epoch_8", "epoch_9"}));
}

TEST(RetentionTest, TheUnionOfAllRules) {
  std::vector<Candidate> candidates = Epochs(1, 12);
  candidates[6].metrics = Metrics{{"m", 1}};
  candidates[1].pinned = true;
  EXPECT_EQ(
      Kept(candidates, {.last = 2, .every = 4, .hours = 5, .best = BestMetric{.metric = "m"}}),
      (Files{"epoch_1", "epoch_2", "epoch_4", "epoch_6", "epoch_7", "epoch_8", "epoch_11",
             "epoch_12"}));
}

TEST(RetentionTest, NamesWithoutACommonOrderAreLeftAlone) {
  EXPECT_EQ(ToDelete({Named("step_1"), Named("epoch_1"), Named("epoch_2")}, {.last = 1}, "epoch_2"),
            Files());
}

TEST(RetentionTest, Metrics) {
  EXPECT_EQ(ParseBestMetric("loss:min").value(), (BestMetric{.metric = "loss", .greatest = false}));
  EXPECT_EQ(ParseBestMetric("a:b/c:max:7").value(), (BestMetric{.metric = "a:b/c", .count = 7}));
  EXPECT_EQ(ParseBestMetric("5:max").value(), (BestMetric{.metric = "5"}));
  for (const char* text : {"", "loss", "loss:", ":max", "loss:best", "loss:max:0", "loss:max:-1",
                           "loss:max:x", "max", "max:3", ":max:3", "loss:MAX"}) {
    const absl::Status status = ParseBestMetric(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("'", text, "'"))) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "METRIC:max")) << status;
  }
}

}  // namespace
}  // namespace ddp::checkpoint
