#include "ddp/trainer/logging/progress.h"

#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace ddp::trainer::logging {
namespace {

TEST(FormatTest, Durations) {
  EXPECT_EQ(ShortDuration(absl::ZeroDuration()), "0s");
  EXPECT_EQ(ShortDuration(absl::Milliseconds(400)), "0s");
  EXPECT_EQ(ShortDuration(absl::Seconds(-3)), "0s");
  EXPECT_EQ(ShortDuration(absl::Milliseconds(59'400)), "59s");
  EXPECT_EQ(ShortDuration(absl::Milliseconds(59'600)), "1m00s");
  EXPECT_EQ(ShortDuration(absl::Seconds(187)), "3m07s");
  EXPECT_EQ(ShortDuration(absl::Seconds(3600)), "1h00m");
  EXPECT_EQ(ShortDuration(absl::Minutes(65)), "1h05m");
  EXPECT_EQ(ShortDuration(absl::Hours(51)), "2d03h");
  EXPECT_EQ(ShortDuration(absl::InfiniteDuration()), "999d+");
}

TEST(FormatTest, Rates) {
  EXPECT_EQ(ShortRate(0.5), "0.50");
  EXPECT_EQ(ShortRate(7.312), "7.31");
  EXPECT_EQ(ShortRate(9.996), "10");
  EXPECT_EQ(ShortRate(831.4), "831");
  EXPECT_EQ(ShortRate(999.7), "1.0k");
  EXPECT_EQ(ShortRate(8'313), "8.3k");
  EXPECT_EQ(ShortRate(99'960), "100k");
  EXPECT_EQ(ShortRate(831'300), "831k");
  EXPECT_EQ(ShortRate(999'900), "1.0M");
  EXPECT_EQ(ShortRate(1'234'000), "1.2M");
}

ProgressState Half() {
  return {.label = "epoch 2/10",
          .step = 422,
          .steps = 938,
          .examples_per_second = 8313,
          .loss = 0.42131,
          .remaining = absl::Seconds(65)};
}

TEST(FormatTest, Line) {
  EXPECT_EQ(FormatLine(Half()), "epoch 2/10 step 422/938 loss 0.4213 8.3k examples/s eta 1m05s");
  EXPECT_EQ(FormatLine({.label = "test", .steps = 5}), "test step 0/5");
}

TEST(FormatTest, ElapsedTimeReplacesWhatRemains) {
  ProgressState state = Half();
  state.elapsed = absl::Seconds(14);
  EXPECT_EQ(FormatLine(state), "epoch 2/10 step 422/938 loss 0.4213 8.3k examples/s took 14s");
}

TEST(FormatTest, LossOfAnySize) {
  const auto loss = [](double value) {
    return FormatLine({.label = "", .steps = 1, .loss = value});
  };
  EXPECT_EQ(loss(0), " step 0/1 loss 0.0000");
  EXPECT_EQ(loss(0.00012345), " step 0/1 loss 1.234e-04");
  EXPECT_EQ(loss(-12.5), " step 0/1 loss -12.5000");
  EXPECT_EQ(loss(123456), " step 0/1 loss 1.235e+05");
  for (const double sign : {1.0, -1.0}) {
    EXPECT_EQ(loss(std::copysign(std::numeric_limits<double>::quiet_NaN(), sign)),
              " step 0/1 loss nan");
  }
}

TEST(FormatTest, BarFillsTheWidthItIsGiven) {
  const ProgressState state = Half();
  EXPECT_EQ(FormatBar(state, 80),
            "epoch 2/10  44% [=======>        ] 422/938 loss 0.4213 8.3k examples/s eta 1m05s");
  // No longer than is good to look at.
  EXPECT_EQ(FormatBar(state, 300).size(), FormatBar(state, 200).size());
  EXPECT_EQ(FormatBar(state, 66), "epoch 2/10  44% 422/938 loss 0.4213 8.3k examples/s eta 1m05s");
  EXPECT_EQ(FormatBar(state, 20), "epoch 2/10  44% 422/");
  for (int columns = 0; columns <= 200; ++columns) {
    ASSERT_LE(FormatBar(state, columns).size(), columns);
  }
  EXPECT_EQ(FormatBar(state, -1), "");
}

TEST(FormatTest, BarAtBothEnds) {
  ProgressState state = {.label = "e", .step = 0, .steps = 8};
  EXPECT_EQ(FormatBar(state, 21), "e   0% [>       ] 0/8");
  state.step = 8;
  EXPECT_EQ(FormatBar(state, 21), "e 100% [========] 8/8");
  state = {.label = "e", .step = 3, .steps = 0};  // an unknown number of steps
  EXPECT_EQ(FormatBar(state, 21), "e   0% [>       ] 3/0");
}

// Records the output of a Progress, with a fake clock.
class ProgressTest : public testing::Test {
 protected:
  ProgressOptions Options(bool terminal, absl::Duration interval) {
    return {.terminal = terminal,
            .interval = interval,
            .columns = [] { return 61; },
            .write = [this](absl::string_view text) { written_.emplace_back(text); },
            .now = [this] { return now_; }};
  }

  void Advance(double seconds) { now_ += absl::Seconds(seconds); }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::vector<std::string> written_;
};

TEST_F(ProgressTest, WritesALineWheneverTheIntervalIsOver) {
  Progress progress(Options(false, absl::Seconds(10)));
  progress.Begin("epoch 1/1", 30, 100);
  for (int step = 1; step <= 30; ++step) {
    Advance(1);
    progress.Update(step, 0.5);
  }
  Advance(1);
  progress.End();
  EXPECT_EQ(written_, std::vector<std::string>({
                          "epoch 1/1 step 10/30 loss 0.5000 100 examples/s eta 20s\n",
                          "epoch 1/1 step 20/30 loss 0.5000 100 examples/s eta 10s\n",
                          "epoch 1/1 step 30/30 loss 0.5000 100 examples/s eta 0s\n",
                          "epoch 1/1 step 30/30 loss 0.5000 100 examples/s took 31s\n",
                      }));
}

TEST_F(ProgressTest, TheRateLeavesOutTheFirstStep) {
  Progress progress(Options(false, absl::ZeroDuration()));
  progress.Begin("e", 4, 10);
  Advance(60);
  progress.Update(1);
  Advance(2);
  progress.Update(2);
  EXPECT_EQ(written_.back(), "e step 2/4 5.00 examples/s eta 4s\n");
}

TEST_F(ProgressTest, ATerminalsLineIsRedrawnInOneWrite) {
  Progress progress(Options(true, absl::ZeroDuration()));
  progress.Begin("e", 4, 10);
  progress.Update(1);
  progress.Update(2);
  progress.Print("saved");
  progress.End();
  EXPECT_EQ(written_, std::vector<std::string>({
                          "\re  25% [==========>                             ] 1/4\x1b[K",
                          "\re  50% [====================>                   ] 2/4\x1b[K",
                          "\rsaved\x1b[K\n",
                          "\re  50% [===================>                   ] 2/4 took 0s\x1b[K",
                          "\n",
                      }));
}

TEST_F(ProgressTest, StretchesDoNotShareTheirRateOrLoss) {
  Progress progress(Options(false, absl::ZeroDuration()));
  progress.Begin("a", 2, 10);
  progress.Update(1, 0.5);
  Advance(1);
  progress.Update(2, 0.5);
  progress.End();
  progress.Begin("b", 2, 10);
  progress.Update(2);  // later than where the rate of "a" was measured from
  EXPECT_EQ(written_.back(), "b step 2/2\n");
}

TEST(ProgressOptionsTest, AFileIsNoTerminal) {
  const std::string path = testing::TempDir() + "/output";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  const ProgressOptions options = ProgressOptions::ForDescriptor(fd);
  EXPECT_FALSE(options.terminal);
  EXPECT_EQ(options.columns(), 80);
  options.write("x");
  EXPECT_EQ(lseek(fd, 0, SEEK_CUR), 1);
  close(fd);
  options.write("into a closed descriptor: no error");
}

TEST(ProgressOptionsTest, APseudoTerminalIs) {
  const int fd = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(fd, 0);
  const ProgressOptions options = ProgressOptions::ForDescriptor(fd);
  EXPECT_TRUE(options.terminal);
  EXPECT_EQ(options.columns(), 80);  // it has no size yet
  EXPECT_EQ(options.interval, absl::Milliseconds(100));
  close(fd);
}

}  // namespace
}  // namespace ddp::trainer::logging
