#include "ddp/trainer/optimizers.h"

#include <memory>
#include <utility>
#include <vector>

#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace ddp::trainer {
namespace {

// The options of the only group of an optimizer of this name.
template <typename Options>
Options OptionsOfOptimizer(const char* name) {
  auto optimizer = MakeOptimizer({.name = name, .lr = 0.25, .momentum = 0.5, .weight_decay = 0.125},
                                 {at::zeros({2}).requires_grad_()});
  EXPECT_TRUE(optimizer.ok()) << optimizer.status();
  EXPECT_EQ((*optimizer)->param_groups().size(), 1);
  return dynamic_cast<const Options&>((*optimizer)->param_groups()[0].options());
}

TEST(OptimizersTest, HaveTheOptionsThatTheyWereGiven) {
  const auto sgd = OptionsOfOptimizer<torch::optim::SGDOptions>("sgd");
  EXPECT_EQ(sgd.lr(), 0.25);
  EXPECT_EQ(sgd.momentum(), 0.5);
  EXPECT_EQ(sgd.weight_decay(), 0.125);
  const auto adam = OptionsOfOptimizer<torch::optim::AdamOptions>("adam");
  EXPECT_EQ(adam.lr(), 0.25);
  EXPECT_EQ(adam.weight_decay(), 0.125);
  const auto adamw = OptionsOfOptimizer<torch::optim::AdamWOptions>("adamw");
  EXPECT_EQ(adamw.lr(), 0.25);
  EXPECT_EQ(adamw.weight_decay(), 0.125);
}

TEST(OptimizersTest, OptionsOutOfRangeAreRefused) {
  for (const OptimizerOptions& options :
       {OptimizerOptions{.lr = -1}, OptimizerOptions{.momentum = -1},
        OptimizerOptions{.weight_decay = -1}}) {
    EXPECT_EQ(OptimizerOf(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(OptimizerOf({.name = "lion"}).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ddp::trainer
