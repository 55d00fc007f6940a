#include "ddp/trainer/lr_scheduler.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
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

TEST(LRSchedulerTest, NumbersThatMakeNoSenseAreRefused) {
  torch::optim::SGD sgd({GroupWithRate(1)}, SGDOptions(1));
  LRScheduler scheduler(sgd, Halving());
  for (const auto& [key, value] : std::vector<std::pair<std::string, c10::IValue>>{
           {"progress", 1.5}, {"total_steps", -1}, {"time_per_step", std::string("fast")}}) {
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
