#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "ddp/trainer/schedule.h"
#include "gtest/gtest.h"
#include "torch/optim/sgd.h"

namespace ddp::trainer {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

OptimizerParamGroup GroupWithRate(double lr) {
  return OptimizerParamGroup({at::ones({1}, at::requires_grad())},
                             std::make_unique<SGDOptions>(lr));
}

std::vector<double> RatesOf(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

Schedule Halving() {
  return *Schedule::Create({.name = "step", .step_epochs = 1, .gamma = 0.5},
                           {.epochs = 4, .steps_per_epoch = 2});
}

TEST(LRSchedulerTest, EachGroupHasItsOwnBaseRateAlsoOneThatIsAddedLater) {
  torch::optim::SGD sgd({GroupWithRate(1), GroupWithRate(8)}, SGDOptions(1));
  LRScheduler scheduler(sgd, Halving());
  EXPECT_EQ(scheduler.step(), 1);
  EXPECT_EQ(RatesOf(sgd), (std::vector<double>{1, 8}));
  scheduler.step();
  EXPECT_EQ(scheduler.step(), 0.5);
  EXPECT_EQ(RatesOf(sgd), (std::vector<double>{0.5, 4}));
  sgd.add_param_group(GroupWithRate(3));
  scheduler.step();
  EXPECT_EQ(RatesOf(sgd), (std::vector<double>{0.5, 4, 1.5}));
}

TEST(LRSchedulerTest, GoesOnWhereItWasSavedAndSaysWhatDiffers) {
  torch::optim::SGD sgd({GroupWithRate(1)}, SGDOptions(1)),
      other({GroupWithRate(2)}, SGDOptions(2));
  LRScheduler first(sgd, Halving());
  for (int i = 0; i < 3; ++i) first.step();
  const checkpoint::State state = *first.state_dict();
  EXPECT_EQ(state.root.at("last_step").toInt(), 3);
  EXPECT_EQ(state.root.at("progress").toDouble(), 3.0 / 8);

  LRScheduler second(other, Halving());
  checkpoint::LoadNotes notes;
  ASSERT_TRUE(second.CheckStateDict(state).ok());
  ASSERT_TRUE(second.load_state_dict(state, notes).ok());
  EXPECT_EQ(notes.lines(), std::vector<std::string>{"with optimizer.lr 2, saved 1"});
  second.GoOn(/*steps=*/3, /*remaining=*/5);
  // A run that takes no further step saves the rates of its last one.
  EXPECT_EQ(other.param_groups()[0].options().get_lr(),
            2 * sgd.param_groups()[0].options().get_lr());
  for (int i = 3; i < 8; ++i) EXPECT_EQ(second.step(), 2 * first.step()) << i;
}

// Of an older checkpoint, or of one whose schedule a save option has left out.
TEST(LRSchedulerTest, WithoutProgressItIsWhereItsStepsAre) {
  torch::optim::SGD sgd({GroupWithRate(1)}, SGDOptions(1));
  LRScheduler scheduler(sgd, Halving());
  scheduler.GoOn(/*steps=*/5, /*remaining=*/3);
  EXPECT_EQ(scheduler.progress(), 5.0 / 8);
  EXPECT_EQ(scheduler.step(), 0.25);
}

// As of a generator, of a run of 100 steps of which it takes every fifth.
TEST(LRSchedulerTest, OneThatDoesNotStepEachTimeGoesOnAfterItsOwnSteps) {
  for (const ScheduleOptions& options :
       std::vector<ScheduleOptions>{{.name = "cosine"}, {.warmup_steps = 30}}) {
    torch::optim::SGD sgd({GroupWithRate(1)}, SGDOptions(1));
    const auto schedule = [&](int64_t steps_per_epoch) {
      return *Schedule::Create(options, {.epochs = 5, .steps_per_epoch = steps_per_epoch});
    };
    LRScheduler whole(sgd, schedule(20));
    const checkpoint::State before = *whole.state_dict();
    for (int i = 0; i < 10; ++i) whole.step();
    const checkpoint::State state = *whole.state_dict();
    checkpoint::LoadNotes notes;
    for (const int64_t position : {50, 53}) {
      torch::optim::SGD other({GroupWithRate(1)}, SGDOptions(1));
      LRScheduler resumed(other, schedule(20));
      ASSERT_TRUE(resumed.load_state_dict(state, notes).ok());
      resumed.GoOn(position, 100 - position);
      EXPECT_EQ(RatesOf(other)[0], whole.schedule().Factor(9));
      for (int i = 10; i < 20; ++i) {
        EXPECT_EQ(resumed.step(), whole.schedule().Factor(i)) << position << " " << i;
      }
      EXPECT_EQ(resumed.state_dict()->root.at("last_step").toInt(), 20);
    }
    // With half of the ranks.
    torch::optim::SGD of_slower({GroupWithRate(1)}, SGDOptions(1));
    LRScheduler slower(of_slower, schedule(40));
    ASSERT_TRUE(slower.load_state_dict(state, notes).ok());
    slower.GoOn(50, 100);
    EXPECT_NEAR(slower.schedule().pace().time_per_step, 0.5, 1e-12);
    // Before its first step.
    torch::optim::SGD of_first({GroupWithRate(1)}, SGDOptions(1));
    LRScheduler first(of_first, schedule(20));
    ASSERT_TRUE(first.load_state_dict(before, notes).ok());
    first.GoOn(4, 96);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(first.step(), whole.schedule().Factor(i)) << i;
  }
}

TEST(LRSchedulerTest, APlateauLowersEachGroupAndGoesOnWithWhatItHasLearned) {
  ScheduleOptions options = {.name = "plateau"};
  options.plateau = {.factor = 0.5, .patience = 1, .cooldown = 1, .min_lr = 2};
  const auto make = [&](torch::optim::Optimizer& optimizer) {
    return LRScheduler(optimizer, *Schedule::Create(options, {.epochs = 9, .steps_per_epoch = 2}));
  };
  torch::optim::SGD sgd({GroupWithRate(1), GroupWithRate(8)}, SGDOptions(1));
  LRScheduler scheduler = make(sgd);
  const std::vector<double> losses = {3, 2, 2, 2, 2, 2, 2, 2, 2, 2};
  std::vector<std::vector<double>> rates;
  for (size_t epoch = 0; epoch < losses.size(); ++epoch) {
    // Another run goes on from here, with the same rates.
    torch::optim::SGD again({GroupWithRate(1), GroupWithRate(8)}, SGDOptions(1));
    LRScheduler resumed = make(again);
    checkpoint::LoadNotes notes;
    const checkpoint::State state = *scheduler.state_dict();
    ASSERT_TRUE(resumed.CheckStateDict(state).ok());
    ASSERT_TRUE(resumed.load_state_dict(state, notes).ok());
    EXPECT_TRUE(notes.lines().empty()) << notes.lines()[0];
    resumed.GoOn(2 * epoch, 18 - 2 * epoch);
    scheduler.step();
    scheduler.step();
    resumed.step();
    EXPECT_EQ(RatesOf(again), RatesOf(sgd));
    rates.push_back(RatesOf(sgd));
    ASSERT_TRUE(scheduler.Evaluated({{"test/accuracy", 1}, {"test/loss", losses[epoch]}}).ok());
    ASSERT_TRUE(resumed.Evaluated({{"test/loss", losses[epoch]}}).ok());
    scheduler.step();
    resumed.step();
    EXPECT_EQ(RatesOf(again), RatesOf(sgd));
  }
  std::vector<double> second;
  for (const auto& of_groups : rates) {
    EXPECT_EQ(of_groups[0], 1);  // below min_lr from the beginning
    second.push_back(of_groups[1]);
  }
  EXPECT_EQ(second, (std::vector<double>{8, 8, 8, 8, 4, 4, 4, 2, 2, 2}));
  const absl::Status unknown = scheduler.Evaluated({{"val/loss", 1}, {"val/top1", 1}});
  EXPECT_EQ(unknown.message(),
            "schedule.plateau.metric=test/loss is no metric of this run's evaluation, which has "
            "val/loss, val/top1");
}

TEST(LRSchedulerTest, APlateauOfAnotherMetricBeginsAnewAtTheReducedRates) {
  torch::optim::SGD sgd({GroupWithRate(8)}, SGDOptions(8));
  ScheduleOptions options = {.name = "plateau"};
  options.plateau = {.factor = 0.5, .patience = 0};
  LRScheduler scheduler(sgd, *Schedule::Create(options, {.epochs = 9}));
  for (const double loss : {1, 2}) ASSERT_TRUE(scheduler.Evaluated({{"test/loss", loss}}).ok());
  options.plateau.metric = "test/accuracy";
  options.plateau.mode = "max";
  torch::optim::SGD other({GroupWithRate(8)}, SGDOptions(8));
  LRScheduler resumed(other, *Schedule::Create(options, {.epochs = 9}));
  checkpoint::LoadNotes notes;
  ASSERT_TRUE(resumed.load_state_dict(*scheduler.state_dict(), notes).ok());
  EXPECT_EQ(notes.lines(),
            (std::vector<std::string>{"with schedule.plateau.metric test/accuracy, saved test/loss",
                                      "with schedule.plateau.mode max, saved min"}));
  resumed.GoOn(1, 8);
  EXPECT_EQ(resumed.step(), 4);
  ASSERT_TRUE(resumed.Evaluated({{"test/accuracy", 0.1}}).ok());
  EXPECT_EQ(resumed.step(), 4);
}

TEST(LRSchedulerTest, DifferencesOfLaterOptionsAreSaid) {
  const auto make = [](torch::optim::Optimizer& optimizer, const ScheduleOptions& options) {
    return LRScheduler(optimizer, *Schedule::Create(options, {.epochs = 9}));
  };
  torch::optim::SGD sgd({GroupWithRate(1), GroupWithRate(2)}, SGDOptions(1)),
      other({GroupWithRate(1), GroupWithRate(3)}, SGDOptions(1));
  LRScheduler first = make(sgd, {.name = "cosine"});
  LRScheduler second = make(other, {.name = "cosine", .min_factor = 0.5});
  for (const bool reverse : {false, true}) {
    LRScheduler& saved = reverse ? second : first;
    LRScheduler& loading = reverse ? first : second;
    checkpoint::LoadNotes notes;
    ASSERT_TRUE(loading.load_state_dict(*saved.state_dict(), notes).ok());
    EXPECT_EQ(notes.lines(),
              (std::vector<std::string>{reverse ? "with schedule.min_factor 0, saved 0.5"
                                                : "with schedule.min_factor 0.5, saved 0",
                                        reverse ? "with optimizer.lr of group 1 2, saved 3"
                                                : "with optimizer.lr of group 1 3, saved 2"}));
  }
  // What is not given leaves no trace.
  EXPECT_FALSE(first.state_dict()->root.contains("options"));
}

TEST(LRSchedulerTest, NumbersThatMakeNoSenseAreRefused) {
  torch::optim::SGD sgd({GroupWithRate(1)}, SGDOptions(1));
  LRScheduler scheduler(sgd, Halving());
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, c10::IValue>>{{"progress", 1.5},
                                                        {"total_steps", -1},
                                                        {"last_step", -1},
                                                        {"time_per_step", std::string("fast")}}) {
    checkpoint::State state = *scheduler.state_dict();
    state.root.insert_or_assign(key, value);
    const absl::Status refused = scheduler.CheckStateDict(state);
    EXPECT_TRUE(
        absl::StrContains(refused.message(), key == "progress" ? "'progress'" : "'scheduler'"))
        << refused;
  }
}

}  // namespace
}  // namespace ddp::trainer
