#include "launchers/local/restart_policy.h"

#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

constexpr int kKilled = 137;

// Of an attempt that went on from one step and came to another.
Progress From(int64_t begun_at, int64_t step) { return {.begun_at = begun_at, .step = step}; }

void ExpectRestart(const RestartPolicy::Decision& decision, absl::Duration wait) {
  EXPECT_TRUE(decision.restart) << decision.why;
  EXPECT_EQ(decision.wait, wait);
}

void ExpectEnd(const RestartPolicy::Decision& decision, const char* why) {
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.why, why);
}

TEST(RestartPolicyTest, WithProgressEachRestartIsAtOnce) {
  RestartPolicy policy(20);
  for (int64_t step = 0; step < 20; ++step) {
    ExpectRestart(policy.AfterFailure(kKilled, From(step, step + 1)), absl::ZeroDuration());
  }
  ExpectEnd(policy.AfterFailure(kKilled, From(20, 21)),
            "restarted 20 times, the maximum (max_restarts)");
}

TEST(RestartPolicyTest, ThreeRestartsWithoutProgressAreTheLast) {
  RestartPolicy policy(20);
  ExpectRestart(policy.AfterFailure(1, From(0, 400)), absl::ZeroDuration());
  ExpectRestart(policy.AfterFailure(1, From(400, 400)), absl::ZeroDuration());
  ExpectRestart(policy.AfterFailure(1, From(400, 400)), absl::Seconds(1));
  Progress last = From(400, 400);
  last.earlier_checkpoint = "runs/a/epoch_3.pt";
  ExpectEnd(policy.AfterFailure(1, last),
            "restarted 3 times from step 400 without reaching 401; an earlier checkpoint to go on "
            "from, in another folder: resume=runs/a/epoch_3.pt");
}

// Steps that were taken before, since the last checkpoint, are none.
TEST(RestartPolicyTest, WhatWasReachedBeforeIsNoProgress) {
  RestartPolicy policy(20);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(policy.AfterFailure(1, From(400, 450)).restart);
  }
  ExpectEnd(policy.AfterFailure(1, From(400, 450)),
            "restarted 3 times from step 400 without reaching 451");
}

TEST(RestartPolicyTest, ProgressForgivesWhatWasBefore) {
  RestartPolicy policy(20);
  for (int i = 0; i < 3; ++i) policy.AfterFailure(1, From(10, 10));
  ExpectRestart(policy.AfterFailure(1, From(10, 11)), absl::ZeroDuration());
  ExpectRestart(policy.AfterFailure(1, From(10, 11)), absl::ZeroDuration());
}

TEST(RestartPolicyTest, AnAttemptThatDoesNotBeginHasMadeNoProgress) {
  RestartPolicy policy(20);
  ExpectRestart(policy.AfterFailure(1, From(0, 7)), absl::ZeroDuration());
  ExpectRestart(policy.AfterFailure(1, std::nullopt), absl::ZeroDuration());
  ExpectRestart(policy.AfterFailure(1, std::nullopt), absl::Seconds(1));
  EXPECT_FALSE(policy.AfterFailure(1, std::nullopt).restart);
}

TEST(RestartPolicyTest, ProgramsThatDoNotSayAreRestartedLessAndLessOften) {
  RestartPolicy policy(12);
  absl::Duration longest;
  for (int i = 0; i < 12; ++i) {
    const RestartPolicy::Decision decision = policy.AfterFailure(kKilled, std::nullopt);
    EXPECT_TRUE(decision.restart);
    EXPECT_GE(decision.wait, longest);
    longest = decision.wait;
  }
  EXPECT_EQ(longest, absl::Minutes(1));
  EXPECT_FALSE(policy.AfterFailure(kKilled, std::nullopt).restart);
}

TEST(RestartPolicyTest, ErrorsThatWouldComeAgainAreNotRepeated) {
  for (const int code : {2, 65}) {
    RestartPolicy policy(5);
    EXPECT_FALSE(policy.AfterFailure(code, From(0, 7)).restart);
  }
  ExpectEnd(RestartPolicy(5).AfterFailure(2, std::nullopt),
            "not restarted: an error with exit code 2 would come again");
  ExpectEnd(RestartPolicy(0).AfterFailure(kKilled, std::nullopt), "");
}

}  // namespace
}  // namespace ddp::launchers
