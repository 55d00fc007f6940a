#include "ddp/config/progress.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace ddp::config {
namespace {

// 2 s a step since step 120, after a start that ended at step 100.
constexpr char kMetrics[] = R"({"step":10,"time":1000,"train/loss":1}
{"step":100,"time":1001,"event":"run_end"}
{"step":0,"time":1900,"hyper_parameters":{"lr":1}}
{"step":120,"time":2000,"train/loss":1}
{"step":140,"time":2040,"train/loss":1}
{"step":15)";

TEST(ProgressTest, IsThatOfTheLastLine) {
  const std::string log =
      "launcher local: …\n"
      "epoch 1/3 step 100/100 loss 0.5 in 3m07s\n"
      "[rank 0] epoch 2/3 step 40/100 loss 0.4213 8.3k examples/s eta 1m05s\n"
      "epoch 2: test accuracy 0.5\n";
  const JobProgress progress = ProgressIn({.log = log, .metrics = kMetrics});
  EXPECT_EQ(progress.epoch, "2/3");
  EXPECT_EQ(progress.eta, "5m20s");  // 160 steps
}

// As with log.progress=false, or where the ranks' output goes to files of their own. The event is
// as trainer_test expects it.
TEST(ProgressTest, NeedsNoLinesOfTheLog) {
  constexpr char kEpoch[] = R"({"step":99,"time":1990,"event":"epoch","epoch":"1","epochs":"3",)"
                            R"("steps":"100","step_in_epoch":"99"}
{"step":110,"time":2000,"train/loss":1}
{"step":110,"time":2000,"event":"epoch","epoch":"2","epochs":"3","steps":"100","step_in_epoch":"10"}
)";
  const JobProgress young = ProgressIn({.metrics = kEpoch});
  EXPECT_EQ(young.epoch, "2/3");
  EXPECT_EQ(young.eta, "");
  const std::string metrics = absl::StrCat(kEpoch,
                                           R"({"step":130,"time":2040,"train/loss":1}
{"step":140,"time":2060,"test/loss":1}
)");
  for (const char* log : {"", "epoch 1/3 step 7/100 x"}) {
    const JobProgress progress = ProgressIn({.log = log, .metrics = metrics});
    EXPECT_EQ(progress.epoch, "2/3");
    EXPECT_EQ(progress.eta, "5m20s");  // 160 steps
  }
  for (const char* epoch :
       {R"("epoch":2,"epochs":"3","steps":"100","step_in_epoch":"1")",
        R"("epoch":"2","epochs":"0","steps":"100","step_in_epoch":"1")",
        R"("epoch":"2","epochs":"3","steps":"1e9","step_in_epoch":"1")",
        R"("epoch":"2","epochs":"3","steps":"9223372036854775807","step_in_epoch":"1")",
        R"("epoch":"2","epochs":"3","steps":"100","step_in_epoch":"-1")"}) {
    const std::string wrong = absl::StrCat(R"({"step":1,"time":1,"event":"epoch",)", epoch, "}\n");
    EXPECT_EQ(ProgressIn({.metrics = wrong}).epoch, "") << epoch;
  }
}

TEST(ProgressTest, TheRunEndsWithItsLastStep) {
  const auto eta = [](absl::string_view config) {
    return ProgressIn({.log = "epoch 2/3 step 40/100 x", .metrics = kMetrics, .config = config})
        .eta;
  };
  EXPECT_EQ(eta("epochs: 3\nmax_steps: 150\n"), "20s");
  EXPECT_EQ(eta("trainer:\n  max_steps: 100\n"), "0s");
  EXPECT_EQ(eta("max_steps: 0\n"), "5m20s");
  EXPECT_EQ(eta("max_steps: 1000\n"), "5m20s");
}

// A killed run leaves no end, and may have waited for its next life.
TEST(ProgressTest, StepsOfAnotherAttemptDoNotCount) {
  constexpr char kKilled[] = R"({"step":10,"time":1767225600,"train/loss":1}
{"step":20,"time":1767225700.5,"train/loss":1}
{"step":21,"time":1767229300,"train/loss":1}
{"step":31,"time":1767229310,"train/loss":1}
)";
  const auto eta = [&](absl::string_view attempts) {
    return ProgressIn({.log = "epoch 1/1 step 31/61 x", .metrics = kKilled, .attempts = attempts})
        .eta;
  };
  constexpr char kFirst[] = "1: job 7, restart 0, on n[1,2], 2025-12-31T23:59:00Z\n";
  EXPECT_EQ(eta(absl::StrCat(kFirst, "2: job 7, restart 1, on n3, 2026-01-01T00:01:40Z\n")), "30s");
  EXPECT_EQ(eta(absl::StrCat(kFirst, "2: job 7, restart 1, on n3, 2026-01-01T01:02:00Z\n")), "");
  EXPECT_EQ(eta("no times"), eta(kFirst));
}

TEST(ProgressTest, WhatIsNotKnownIsEmpty) {
  EXPECT_EQ(ProgressIn({.metrics = kMetrics}).epoch, "");
  EXPECT_EQ(
      ProgressIn({.log = "epoch 2/x step 1/2 \nepoch 1/2 step 0/0 x", .metrics = kMetrics}).epoch,
      "");
  const JobProgress young =
      ProgressIn({.log = "epoch 1/3 step 0/100\n", .metrics = "{\"step\":10,\"time\":1000}\n"});
  EXPECT_EQ(young.epoch, "1/3");
  EXPECT_EQ(young.eta, "");
}

}  // namespace
}  // namespace ddp::config
