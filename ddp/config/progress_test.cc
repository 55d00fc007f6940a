#include "ddp/config/progress.h"

#include <string>

#include "gtest/gtest.h"

namespace ddp::config {
namespace {

// 2 s a step since step 120, after a start that ended at step 100.
constexpr char kMetrics[] = R"({"step":10,"time":1000,"train/loss":1}
{"step":100,"time":1001,"event":"run_end"}
{"step":120,"time":2000,"train/loss":1}
{"step":140,"time":2040,"train/loss":1}
{"step":15)";

TEST(ProgressTest, IsThatOfTheLastLine) {
  const std::string log =
      "launcher local: …\n"
      "epoch 1/3 step 100/100 loss 0.5 in 3m07s\n"
      "[rank 0] epoch 2/3 step 40/100 loss 0.4213 8.3k examples/s eta 1m05s\n"
      "epoch 2: test accuracy 0.5\n";
  const JobProgress progress = ProgressIn(log, kMetrics);
  EXPECT_EQ(progress.epoch, "2/3");
  EXPECT_EQ(progress.eta, "5m20s");  // 160 steps
}

TEST(ProgressTest, WhatIsNotKnownIsEmpty) {
  EXPECT_EQ(ProgressIn("", kMetrics).epoch, "");
  EXPECT_EQ(ProgressIn("epoch 2/x step 1/2 \nepoch 1/2 step 0/0 x", kMetrics).epoch, "");
  const JobProgress young = ProgressIn("epoch 1/3 step 0/100\n", "{\"step\":10,\"time\":1000}\n");
  EXPECT_EQ(young.epoch, "1/3");
  EXPECT_EQ(young.eta, "");
}

}  // namespace
}  // namespace ddp::config
