#include "ddp/trainer/schedule.h"

#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

TEST(ScheduleTest, ConstantWithWarmUp) {
  Schedule schedule = *Schedule::Create({.name = "constant", .warmup_steps = 4});
  EXPECT_DOUBLE_EQ(schedule.Factor(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(1000), 1.0);
}

TEST(ScheduleTest, StepDecaysEveryStepSize) {
  Schedule schedule = *Schedule::Create({.name = "step", .step_size = 10, .gamma = 0.5});
  EXPECT_DOUBLE_EQ(schedule.Factor(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 0.5);
  EXPECT_DOUBLE_EQ(schedule.Factor(25), 0.25);
}

TEST(ScheduleTest, CosineGoesFromOneToZeroAfterWarmUp) {
  Schedule schedule = *Schedule::Create({.name = "cosine", .warmup_steps = 10, .total_steps = 110});
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 1.0);
  EXPECT_NEAR(schedule.Factor(60), 0.5, 1e-12);
  EXPECT_NEAR(schedule.Factor(110), 0.0, 1e-12);
  EXPECT_NEAR(schedule.Factor(500), 0.0, 1e-12);
}

TEST(ScheduleTest, MistakesAreNamed) {
  EXPECT_EQ(Schedule::Create({.name = "cosin"}).status().message(),
            "unknown schedule 'cosin'; there are: constant, cosine, step");
  EXPECT_FALSE(Schedule::Create({.name = "constant", .warmup_steps = -1}).ok());
  EXPECT_FALSE(Schedule::Create({.name = "step"}).ok());
  EXPECT_FALSE(Schedule::Create({.name = "cosine"}).ok());
}

}  // namespace
}  // namespace ddp::trainer
