#include "ddp/trainer/schedule.h"

#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

TEST(ScheduleTest, ConstantWithWarmUp) {
  Schedule schedule = *Schedule::Create({.name = "constant", .warmup_steps = 4}, 1, 1);
  EXPECT_DOUBLE_EQ(schedule.Factor(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(1000), 1.0);
}

TEST(ScheduleTest, StepDecaysEveryFewEpochs) {
  Schedule schedule =
      *Schedule::Create({.name = "step", .step_epochs = 0.5, .gamma = 0.5}, /*epochs=*/3, 20);
  EXPECT_DOUBLE_EQ(schedule.Factor(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 0.5);
  EXPECT_DOUBLE_EQ(schedule.Factor(25), 0.25);
}

TEST(ScheduleTest, CosineGoesFromOneToZeroAfterWarmUp) {
  Schedule schedule = *Schedule::Create({.name = "cosine", .warmup_steps = 10}, 11, 10);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 1.0);
  EXPECT_NEAR(schedule.Factor(60), 0.5, 1e-12);
  EXPECT_NEAR(schedule.Factor(110), 0.0, 1e-12);
  EXPECT_NEAR(schedule.Factor(500), 0.0, 1e-12);
}

TEST(ScheduleTest, ARunOfNoStepsHasASchedule) {
  EXPECT_DOUBLE_EQ(Schedule::Create({.name = "cosine"}, 0, 0)->Factor(0), 1.0);
  EXPECT_EQ(Schedule::Create({.name = "step", .step_epochs = 0.001}, 1, 2)->step_size(), 1);
}

TEST(ScheduleTest, MistakesAreNamed) {
  EXPECT_EQ(Schedule::Create({.name = "cosin"}, 1, 1).status().message(),
            "name=cosin is none of constant, step, cosine");
  EXPECT_FALSE(Schedule::Create({.name = "constant", .warmup_steps = -1}, 1, 1).ok());
  EXPECT_FALSE(Schedule::Create({.name = "step", .step_epochs = 0}, 1, 1).ok());
}

}  // namespace
}  // namespace ddp::trainer
