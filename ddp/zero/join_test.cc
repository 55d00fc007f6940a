// Sharded optimizers in a Join: no rank waits forever, whatever the ranks' numbers of batches.
#include "ddp/join.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/zero/zero_testing.h"
#include "gtest/gtest.h"
#include "torch/serialize/output-archive.h"

namespace ddp::zero {
namespace {

struct Small : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x).tanh()); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 37))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(37, 2))};
};

struct Setting {
  int stage = 0;
  std::vector<int> batches = {};  // by rank
  int accumulate = 1;             // batches per step; a rank may run out within a step
  bool of_all_ranks = true;
};

// The parameters in the end, on this rank.
std::vector<at::Tensor> Train(const Setting& run, int rank, const GroupPtr& group) {
  auto net = SeededNet<Small>();
  auto model = *Wrap(net, group, {.bucket_cap_mb = 3e-4, .reduce_gradients = run.stage != 2});
  const auto make = optim::FactoryOf<optim::FusedAdamW>(torch::optim::AdamWOptions(0.01));
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  ZeroRedundancyOptimizer* zero = nullptr;
  std::vector<Joinable*> joinables = {&model->parallel()};
  if (run.stage == 0) {
    optimizer = make({torch::optim::OptimizerParamGroup(net->parameters())});
  } else {
    auto made = *ZeroRedundancyOptimizer::Create(
        net->parameters(), group, make,
        {.stage = run.stage, .overlap_gather = true, .bucket_cap_mb = 3e-4});
    zero = made.get();
    joinables.push_back(zero);
    optimizer = std::move(made);
  }
  const auto body = [&] {
    for (int batch = 0; batch < run.batches[rank]; ++batch) {
      const bool last = (batch + 1) % run.accumulate == 0;
      model->parallel().set_require_backward_grad_sync(last);
      if (zero != nullptr) zero->WaitForParameters();
      const at::Tensor x = (at::arange(12).view({3, 4}) * 0.3 + rank + 0.7 * batch).sin();
      model->forward(x).pow(2).sum().backward();
      if (!last) continue;
      if (zero != nullptr) {
        zero->clip_grad_norm_(0.5);
      } else {
        ddp::clip_grad_norm_(net->parameters(), 0.5);
      }
      optimizer->step();
      if (zero != nullptr) zero->zero_grad();
      model->zero_grad();
    }
    return absl::OkStatus();
  };
  const absl::Status joined =
      Join(joinables, {.divide_by_initial_world_size = run.of_all_ranks}, body);
  EXPECT_TRUE(joined.ok()) << joined;
  return Values(*net);
}

TEST(JoinTest, RandomLengthsEndAndStagesAgree) {
  // Bazel numbers the runs of --runs_per_test: each run of .ci/soak has lengths of its own.
  const char* run_number = std::getenv("TEST_RANDOM_SEED");
  const int seed = run_number == nullptr ? 1 : std::atoi(run_number);
  std::mt19937 random(seed);
  const int ranks = 3;
  for (int round = 0; round < 40; ++round) {
    Setting run = {.accumulate = round % 3 == 0 ? 2 : 1};
    // Otherwise stage 2, which reduces each batch, divides each by its own number of ranks.
    run.of_all_ranks = run.accumulate > 1 || round % 2 == 0;
    for (int rank = 0; rank < ranks; ++rank) {
      run.batches.push_back(static_cast<int>(random() % 6));
    }
    std::string what =
        absl::StrCat("seed ", seed, " round ", round, " accumulate ", run.accumulate, " batches");
    for (const int batches : run.batches) absl::StrAppend(&what, " ", batches);
    SCOPED_TRACE(what);
    std::map<int, std::vector<at::Tensor>> parameters;
    for (run.stage = 0; run.stage <= 2; ++run.stage) {
      RunRanks(ranks, [&](int rank, const GroupPtr& group) {
        const std::vector<at::Tensor> mine = Train(run, rank, group);
        ExpectSameBitsOnAllRanks(group, mine, absl::StrCat("stage ", run.stage, " rank ", rank));
        if (Records(rank)) parameters[run.stage] = mine;
      });
    }
    // The stages sum in other orders where gradients accumulate; the optimizer amplifies that.
    ExpectWithin(parameters[0], parameters[1], 1e-4, "stages 0 and 1");
    ExpectWithin(parameters[0], parameters[2], 1e-4, "stages 0 and 2");
    if (testing::Test::HasFailure()) return;
  }
}

struct Weight : torch::nn::Module {
  at::Tensor forward(const at::Tensor& factor) { return (weight * factor).sum(); }
  at::Tensor weight{register_parameter("weight", at::ones({100}))};
};

// The gradient is half of `factor`: the mean of two ranks, of which one has no inputs.
void Backward(DistributedDataParallel<Weight>& model, double factor) {
  model.forward(at::full({100}, factor)).backward();
}

using Body = std::function<void(DistributedDataParallel<Weight>&, ZeroRedundancyOptimizer&)>;
using Check = std::function<void(const absl::Status& joined, const at::Tensor& weight)>;

// Rank 0 makes `body`, with SGD of rate 1, and rank 1 shadows it; then both check.
void RunShadowed(const Body& body, const Check& check, const std::vector<int>& stages = {1, 2}) {
  for (const int stage : stages) {
    SCOPED_TRACE(absl::StrCat("stage ", stage));
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Weight>(), group, {.reduce_gradients = stage != 2});
      auto zero = *ZeroRedundancyOptimizer::Create(
          model->module()->parameters(), group,
          optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = stage});
      const absl::Status joined = Join({&model->parallel(), zero.get()}, {}, [&] {
        if (rank == 0) body(*model, *zero);
        return absl::OkStatus();
      });
      check(joined, model->module()->weight.detach());
    });
  }
}

TEST(JoinTest, AShadowClipsValues) {
  RunShadowed(
      [](auto& model, auto& zero) {
        Backward(model, 8);
        zero.clip_grad_value_(0.25);
        zero.step();
      },
      [](const absl::Status& joined, const at::Tensor& weight) {
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_TRUE(at::equal(weight, at::full({100}, 0.75)));
      });
}

// As after a step that a gradient scaler skips.
TEST(JoinTest, AShadowForgetsGradientsThatAreReset) {
  RunShadowed(
      [](auto& model, auto& zero) {
        Backward(model, std::numeric_limits<double>::infinity());
        EXPECT_TRUE(zero.unscale_(1));
        zero.zero_grad();
        model.zero_grad();
        Backward(model, 1);
        EXPECT_FALSE(zero.unscale_(1));
        zero.step();
      },
      [](const absl::Status& joined, const at::Tensor& weight) {
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_TRUE(at::equal(weight, at::full({100}, 0.5)));
      });
}

TEST(JoinTest, ANormThatIsNotFiniteIsAnErrorOfShadowsToo) {
  RunShadowed(
      [](auto& model, auto& zero) {
        Backward(model, std::numeric_limits<double>::quiet_NaN());
        zero.clip_grad_norm_(1, 2, /*error_if_nonfinite=*/true);
      },
      [](const absl::Status& joined, const at::Tensor&) {
        EXPECT_TRUE(absl::StrContains(joined.message(), "the norm of the gradients is")) << joined;
      });
}

TEST(JoinTest, AShadowMultipliesItsGradients) {
  RunShadowed(
      [](auto& model, auto& zero) {
        Backward(model, 8);
        zero.MultiplyGradients(0.25);
        zero.step();
      },
      [](const absl::Status& joined, const at::Tensor& weight) {
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_TRUE(at::equal(weight, at::ones({100}) - 4 * 0.25)) << weight;
      });
}

// In the second Join the schedule of the rank that had run out is behind: each rank would update
// its pieces with a rate of its own.
TEST(JoinTest, RanksWithInputsMustStepWithTheSameOptions) {
  for (const int stage : {1, 2}) {
    SCOPED_TRACE(absl::StrCat("stage ", stage));
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Weight>(), group, {.reduce_gradients = stage != 2});
      auto zero = *ZeroRedundancyOptimizer::Create(
          model->module()->parameters(), group,
          optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = stage});
      int64_t steps = 0;  // of this rank's schedule
      const auto epoch = [&](int batches) {
        return Join({&model->parallel(), zero.get()}, {}, [&] {
          for (int batch = 0; batch < batches; ++batch) {
            zero->param_groups()[0].options().set_lr(1.0 / static_cast<double>(1 + steps++));
            zero->zero_grad();
            Backward(*model, 2);
            zero->step();
          }
          return absl::OkStatus();
        });
      };
      EXPECT_TRUE(epoch(2 - rank).ok());
      EXPECT_TRUE(at::equal(model->module()->weight.detach(), at::full({100}, 1 - 2 - 0.5)));
      const absl::Status behind = epoch(1);
      EXPECT_TRUE(absl::StrContains(behind.message(), "steps with the same options")) << behind;
    });
  }
}

TEST(JoinTest, AShadowStepsWithTheOptionsOfTheOthers) {
  RunShadowed(
      [](auto& model, auto& zero) {
        // Valid over steps, as of any optimizer.
        torch::optim::OptimizerOptions& options = zero.param_groups()[0].options();
        for (const double lr : {1.0, 0.5, 0.25}) {
          options.set_lr(lr);
          zero.zero_grad();
          Backward(model, 2);
          zero.step();
        }
      },
      [](const absl::Status& joined, const at::Tensor& weight) {
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_TRUE(at::equal(weight, at::full({100}, 1 - 1.75))) << weight;
      });
}

// In stage 1 gradients are the parameters' .grad, which callers may change.
TEST(JoinTest, AShadowStepsWithWhatTheOthersMakeOfTheirGradients) {
  const std::vector<std::pair<Body, double>> loops = {
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         ddp::clip_grad_value_(model.module()->parameters(), 0.25);
         zero.step();
       },
       1 - 0.25},
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         const at::NoGradGuard no_grad;
         model.module()->weight.mutable_grad().mul_(0.25);
         zero.clip_grad_value_(2);
         zero.step();
       },
       1 - 1},
      // A step that is skipped, and one after it.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.clip_grad_norm_(1);
         zero.zero_grad();
         Backward(model, 2);
         zero.clip_grad_value_(0.5);
         zero.step();
         zero.zero_grad();
         Backward(model, 2);
         ddp::clip_grad_value_(model.module()->parameters(), 0.25);
         zero.step();
       },
       1 - 0.5 - 0.25},
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.clip_grad_norm_(1);
         zero.zero_grad();
         Backward(model, 8);
         ddp::clip_grad_value_(model.module()->parameters(), 0.25);
         zero.step();
       },
       1 - 0.25},
      // The norm is asked for alone.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         EXPECT_EQ(zero.clip_grad_norm_(std::numeric_limits<double>::infinity()), 4 * 10);
         ddp::clip_grad_value_(model.module()->parameters(), 0.25);
         zero.step();
       },
       1 - 0.25},
      // A change after the optimizer's own clip.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.clip_grad_value_(2);
         const at::NoGradGuard no_grad;
         model.module()->weight.mutable_grad().mul_(0.25);
         zero.step();
       },
       1 - 0.5},
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.clip_grad_norm_(1);  // to 0.1 each
         ddp::clip_grad_value_(model.module()->parameters(), 0.0625);
         zero.step();
       },
       1 - 0.0625},
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.clip_grad_value_(2);
         EXPECT_FALSE(zero.unscale_(0.5));
         const at::NoGradGuard no_grad;
         model.module()->weight.mutable_grad().add_(1);
         zero.clip_grad_value_(0.75);
         model.module()->weight.mutable_grad().mul_(2);
         zero.MultiplyGradients(0.25);
         zero.step();
       },
       1 - 0.75 / 2},
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         model.module()->weight.mutable_grad().reset();
         zero.step();
       },
       1},
      {[](auto& model, auto& zero) {
         model.module()->weight.mutable_grad() = at::full({100}, 0.5);
         zero.step();
       },
       1 - 0.5},
  };
  for (size_t i = 0; i < loops.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("loop ", i));
    RunShadowed(loops[i].first,
                [&](const absl::Status& joined, const at::Tensor& weight) {
                  EXPECT_TRUE(joined.ok()) << joined;
                  EXPECT_TRUE(at::equal(weight, at::full({100}, loops[i].second))) << weight;
                },
                {1});
  }
}

// A limit on weights, and values that are loaded, in memory of their own.
TEST(JoinTest, AShadowStepsFromTheValuesOfTheOthers) {
  for (const bool loads : {false, true}) {
    SCOPED_TRACE(loads ? "loaded" : "changed in place");
    RunShadowed(
        [&](auto& model, auto& zero) {
          at::Tensor& weight = model.module()->weight;
          for (const double factor : {16, 4}) {  // the averages are half of it
            zero.zero_grad();
            Backward(model, factor);
            zero.step();
            const at::NoGradGuard no_grad;
            if (loads) {
              weight.set_data(weight.detach().clamp(0));
            } else {
              weight.clamp_(0);
            }
          }
          zero.zero_grad();
          Backward(model, 2);
          zero.step();
        },
        [](const absl::Status& joined, const at::Tensor& weight) {
          EXPECT_TRUE(joined.ok()) << joined;
          EXPECT_TRUE(at::equal(weight, at::full({100}, -1.0f))) << weight;
        });
  }
}

// As a schedule's: other options in each step, of both groups.
void SetOptionsOf(int step, torch::optim::Optimizer& optimizer) {
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    torch::optim::OptimizerOptions& options = optimizer.param_groups()[g].options();
    const double part = static_cast<double>(step) / 5, decay = 0.1 * part;
    options.set_lr(0.05 * static_cast<double>(g + 1) * (1 + std::cos(M_PI * part)) / 2);
    if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
      sgd->momentum(0.9 - 0.5 * part).weight_decay(decay);
    } else {
      dynamic_cast<torch::optim::AdamWOptions&>(options).weight_decay(decay);
    }
  }
}

at::Tensor Loss(Small& net, int rank, int step) {
  const at::Tensor x = (at::arange(12).view({3, 4}) * 0.3 + rank + 0.7 * step).sin();
  return net.forward(x).pow(2).sum();
}

// What one process has in the end that takes all ranks' batches.
std::vector<at::Tensor> ScheduledInOneProcess(const MakeOptimizer& make,
                                              const std::vector<int>& batches) {
  auto net = SeededNet<Small>();
  const auto optimizer = make(Groups(*net));
  const int steps = *std::max_element(batches.begin(), batches.end());
  const int ranks = static_cast<int>(batches.size());
  for (int step = 0; step < steps; ++step) {
    SetOptionsOf(step, *optimizer);
    for (int rank = 0; rank < ranks; ++rank) {
      if (step < batches[rank]) (Loss(*net, rank, step) / ranks).backward();
    }
    optimizer->step();
    net->zero_grad();
  }
  return Values(*net);
}

// Whichever rank runs out first, or has no batches at all.
TEST(JoinTest, ScheduledOptionsTrainAsOneProcessDoes) {
  const std::vector<NamedOptimizer> optimizers = {
      {"FusedSGD", optim::FactoryOf<optim::FusedSGD>(torch::optim::SGDOptions(1))},
      {"FusedAdamW", optim::FactoryOf<optim::FusedAdamW>(torch::optim::AdamWOptions(1))}};
  for (const std::vector<int>& batches : {std::vector<int>{2, 5}, {5, 0}, {0, 2, 5}}) {
    for (const NamedOptimizer& optimizer : optimizers) {
      const std::vector<at::Tensor> expected = ScheduledInOneProcess(optimizer.make, batches);
      for (const int stage : {0, 1, 2}) {
        const std::string what = absl::StrCat(optimizer.name, ", stage ", stage, ", batches ",
                                              absl::StrJoin(batches, " "));
        SCOPED_TRACE(what);
        RunRanks(static_cast<int>(batches.size()), [&](int rank, const GroupPtr& group) {
          auto net = SeededNet<Small>();
          auto model = *Wrap(net, group, {.reduce_gradients = stage != 2});
          std::vector<Joinable*> joinables = {&model->parallel()};
          std::unique_ptr<torch::optim::Optimizer> stepped;
          if (stage == 0) {
            stepped = optimizer.make(Groups(*net));
          } else {
            auto zero = *ZeroRedundancyOptimizer::Create(Groups(*net), group, optimizer.make,
                                                         {.stage = stage});
            joinables.push_back(zero.get());
            stepped = std::move(zero);
          }
          const absl::Status joined = Join(joinables, {}, [&] {
            for (int step = 0; step < batches[rank]; ++step) {
              SetOptionsOf(step, *stepped);
              model->parallel().PreForward();
              const at::Tensor loss = Loss(*net, rank, step);
              model->parallel().PostForward({loss});
              loss.backward();
              stepped->step();
              model->zero_grad();
            }
            return absl::OkStatus();
          });
          EXPECT_TRUE(joined.ok()) << joined;
          ExpectWithin(Values(*net), expected, 1e-5, absl::StrCat(what, ", rank ", rank));
        });
      }
    }
  }
}

TEST(JoinTest, AGroupThatShadowsLackIsAnErrorOfAll) {
  RunShadowed(
      [](auto& model, auto& zero) {
        zero.add_param_group(torch::optim::OptimizerParamGroup(
            {at::ones({30}).requires_grad_()}, std::make_unique<torch::optim::SGDOptions>(0.25)));
        Backward(model, 1);
        zero.step();
      },
      [](const absl::Status& joined, const at::Tensor&) {
        EXPECT_TRUE(absl::StrContains(joined.message(), "add groups before a rank runs out"))
            << joined;
      });
}

// Of the optimizer's: the wrapper knows nothing of it.
TEST(JoinTest, GradientsOfNoSyncAreReducedAlsoIfTheirRankRunsOut) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Weight>(), group, {.reduce_gradients = false});
    auto zero = *ZeroRedundancyOptimizer::Create(
        model->module()->parameters(), group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = 2});
    const absl::Status joined = Join({&model->parallel(), zero.get()}, {}, [&] {
      const at::Tensor loss = model->forward(at::full({100}, rank == 0 ? 2 : 6));
      {
        const auto no_sync = zero->no_sync();
        loss.backward();
      }
      if (rank == 1) return absl::OkStatus();
      Backward(*model, 4);
      zero->step();
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_TRUE(at::equal(model->module()->weight.detach(), at::full({100}, 1 - (2 + 6 + 4) / 2)));
  });
}

TEST(JoinTest, ResetsAndForwardsAtAnyPlace) {
  const std::vector<std::pair<Body, double>> loops = {
      // A reset between forward and backward.
      {[](auto& model, auto& zero) {
         for (int step = 0; step < 2; ++step) {
           const at::Tensor loss = model.forward(at::full({100}, 8));
           zero.zero_grad();
           loss.backward();
           zero.step();
         }
       },
       1 - 4 - 4},
      // Forwards without a backward, with and without gradients, before and after it.
      {[](auto& model, auto& zero) {
         model.forward(at::ones({100}));
         Backward(model, 8);
         {
           const at::NoGradGuard no_grad;
           model.forward(at::ones({100}));
         }
         model.forward(at::ones({100}));
         zero.clip_grad_value_(3);
         zero.step();
       },
       1 - 3},
      // Gradients add up over two backwards that are both reduced.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         Backward(model, 2);
         zero.step();
       },
       1 - 5},
      // Gradients that no step takes.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         zero.zero_grad();
         Backward(model, 2);
         zero.step();
       },
       1 - 1},
      // By the wrapper.
      {[](auto& model, auto& zero) {
         Backward(model, 8);
         model.zero_grad();
         Backward(model, 2);
         zero.step();
       },
       1 - 1},
      // Resets that this library does not see, and in place.
      {[](auto& model, auto& zero) {
         for (const bool set_to_none : {true, false}) {
           Backward(model, 8);
           zero.step();
           model.module()->zero_grad(set_to_none);
         }
         Backward(model, 2);
         zero.step();
       },
       1 - 4 - 4 - 1},
  };
  for (size_t i = 0; i < loops.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("loop ", i));
    const double expected = loops[i].second;
    RunShadowed(loops[i].first, [&](const absl::Status& joined, const at::Tensor& weight) {
      EXPECT_TRUE(joined.ok()) << joined;
      EXPECT_TRUE(at::equal(weight, at::full({100}, expected))) << weight[0] << weight[99];
    });
  }
}

struct BodyAndHead : torch::nn::Module {
  at::Tensor forward(double factor) { return ((body + head) * factor).sum(); }
  at::Tensor body{register_parameter("body", at::ones({100}))};
  at::Tensor head{register_parameter("head", at::ones({100}))};
};

// The optimizer has, and resets, one of two parameters. Rank 1 has no inputs.
TEST(JoinTest, AShadowForgetsTheGradientsThatAreResetAndNoOthers) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    const auto net = std::make_shared<BodyAndHead>();
    auto model = *Wrap(net, group);
    auto zero = *ZeroRedundancyOptimizer::Create(
        std::vector<at::Tensor>{net->head}, group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = 1});
    const absl::Status joined = Join({&model->parallel(), zero.get()}, {}, [&] {
      if (rank != 0) return absl::OkStatus();
      for (const double factor : {8, 2}) {
        model->forward(factor).backward();
        zero->step();
        zero->zero_grad();
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_TRUE(at::equal(net->head.detach(), at::full({100}, 1 - 4 - 1))) << net->head[0];
    EXPECT_TRUE(at::equal(net->body.grad(), at::full({100}, 4 + 1))) << net->body.grad()[0];
  });
}

// A model of stage 0 and one of stage 2. Rank 1 has one batch less.
void RunTwoModels(
    const std::function<absl::Status(DistributedDataParallel<Weight>& first, torch::optim::SGD& sgd,
                                     DistributedDataParallel<Weight>& second,
                                     ZeroRedundancyOptimizer& zero, int rank)>& body,
    const std::function<void(const absl::Status&, const at::Tensor& first,
                             const at::Tensor& second)>& check) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto first = *Wrap(std::make_shared<Weight>(), group);
    auto second = *Wrap(std::make_shared<Weight>(), group, {.reduce_gradients = false});
    torch::optim::SGD sgd(first->module()->parameters(), torch::optim::SGDOptions(1));
    auto zero = *ZeroRedundancyOptimizer::Create(
        second->module()->parameters(), group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = 2});
    const absl::Status joined = Join({&first->parallel(), &second->parallel(), zero.get()}, {},
                                     [&] { return body(*first, sgd, *second, *zero, rank); });
    check(joined, first->module()->weight.detach(), second->module()->weight.detach());
  });
}

TEST(JoinTest, TwoModelsOneOfThemOfStageTwo) {
  RunTwoModels(
      [](auto& first, auto& sgd, auto& second, auto& zero, int rank) {
        for (int step = rank; step < 2; ++step) {
          sgd.zero_grad();
          const at::Tensor of_first = first.forward(at::full({100}, 2));
          const at::Tensor of_second = second.forward(at::full({100}, 4));
          of_first.backward();
          of_second.backward();
          sgd.step();
          zero.step();
        }
        return absl::OkStatus();
      },
      [](const absl::Status& joined, const at::Tensor& first, const at::Tensor& second) {
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_TRUE(at::equal(first, at::full({100}, 1 - 2 - 1))) << first[0];
        EXPECT_TRUE(at::equal(second, at::full({100}, 1 - 4 - 2))) << second[0];
      });
}

TEST(JoinTest, OneBackwardThroughTwoModelsIsRefused) {
  RunTwoModels(
      [](auto& first, auto&, auto& second, auto&, int) {
        (first.forward(at::ones({100})) + second.forward(at::ones({100}))).backward();
        return absl::OkStatus();
      },
      [](const absl::Status& joined, const at::Tensor&, const at::Tensor&) {
        EXPECT_TRUE(absl::StrContains(joined.message(), "one joined model at a time")) << joined;
      });
}

TEST(JoinTest, WhatIsNotInTheListSaysSo) {
  RunRanks(2, [](int, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Weight>(), group);
    auto zero = *ZeroRedundancyOptimizer::Create(
        model->module()->parameters(), group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = 1});
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      Backward(*model, 1);
      zero->step();
      return absl::OkStatus();
    });
    EXPECT_TRUE(absl::StrContains(joined.message(), "ZeroRedundancyOptimizer")) << joined;
    EXPECT_TRUE(absl::StrContains(joined.message(), "add it to the list")) << joined;
    const absl::Status nested = Join({&model->parallel()}, {}, [&] {
      return Join({zero.get()}, {}, [] { return absl::OkStatus(); });
    });
    EXPECT_TRUE(absl::StrContains(nested.message(), "list all objects in one Join")) << nested;
  });
}

TEST(JoinTest, RanksThatHaveRunOutGiveTheirPartOfTheState) {
  RunShadowed(
      [](auto& model, auto& zero) {
        Backward(model, 1);
        zero.step();
        for (const int to : {0, ZeroRedundancyOptimizer::kAllRanks}) {
          const auto state = zero.ConsolidateStateDict(to);
          EXPECT_TRUE(state.ok()) << state.status();
        }
        torch::serialize::OutputArchive archive;
        zero.save(archive);
      },
      [](const absl::Status& joined, const at::Tensor&) { EXPECT_TRUE(joined.ok()) << joined; });
}

}  // namespace
}  // namespace ddp::zero
