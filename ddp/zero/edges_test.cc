// Parameters of all kinds, late groups, precision, and what is refused by name.

#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/clip_grad.h"
#include "ddp/sent_tensors_testing.h"
#include "ddp/zero/memory_plan.h"
#include "ddp/zero/zero_testing.h"
#include "optim/state_dict.h"
#include "torch/csrc/distributed/c10d/comm.hpp"
#include "torch/nn/modules/embedding.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/schedulers/step_lr.h"
#include "torch/serialize.h"

namespace ddp::zero {
namespace {

using torch::optim::SGDOptions;

TEST(ZeroEdgesTest, RefusesByName) {
  at::Tensor a = at::ones({4}).requires_grad_(), b = at::ones({4}).requires_grad_();
  const auto refused = [&](std::vector<at::Tensor> parameters, const optim::OptimizerFactory& make,
                           const ZeroOptions& options) {
    const auto made = ZeroRedundancyOptimizer::Create(parameters, nullptr, make, options);
    EXPECT_FALSE(made.ok());
    return std::string(made.status().message());
  };
  EXPECT_TRUE(absl::StrContains(refused({a, b, a}, Sgd(1), {.stage = 1}),
                                "parameter 2 is parameter 0 again"));
  EXPECT_TRUE(absl::StrContains(refused({b, b.detach().slice(0, 2)}, Sgd(1), {.stage = 1}),
                                "parameters 0 and 1 share memory"));
  EXPECT_TRUE(absl::StrContains(refused({a, at::ones({2}, at::kLong)}, Sgd(1), {.stage = 1}),
                                "parameter 1 is not a dense tensor of floating point"));
  EXPECT_TRUE(
      absl::StrContains(refused({a, at::ones({2}, at::kComplexFloat)}, Sgd(1), {.stage = 2}),
                        "parameter 1 is not a dense tensor of floating point"));
  const auto lbfgs = optim::FactoryOf<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1));
  for (const char* partition : {"flat", "tensor"}) {
    EXPECT_TRUE(
        absl::StrContains(refused({a}, lbfgs, {.stage = 1, .partition = partition}), "LBFGS"));
  }
  EXPECT_TRUE(absl::StrContains(refused({a}, Sgd(1), {.stage = 0}), "zero.stage=0"));
  EXPECT_TRUE(absl::StrContains(refused({a}, Sgd(1), {.stage = 3}), "3"));
  EXPECT_TRUE(absl::StrContains(refused({a}, Sgd(1), {.stage = 1, .partition = "rows"}), "rows"));

  at::Tensor half = at::ones({4}, at::kHalf).requires_grad_();
  auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a, half}, nullptr,
                                                    Sgd(1), {.stage = 1});
  a.mutable_grad() = at::ones({4});
  half.mutable_grad() = at::ones({4}, at::kHalf);
  const std::string unscaled = Thrown([&] { optimizer->unscale_(0.5); });
  EXPECT_TRUE(absl::StrContains(unscaled, "parameter group 0")) << unscaled;
  EXPECT_TRUE(absl::StrContains(unscaled, "float16")) << unscaled;
}

TEST(ZeroEdgesTest, OverShmParametersLieInSharedMemory) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << BackendUnderTest() << " has no arena";
  for (const int stage : {1, 2}) {
    RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
      Training run(group, Optimizers()[0].make, {.stage = stage});
      for (int step = 0; step < 2; ++step) {
        run.Step(step);
        for (const at::Tensor& parameter : run.net->parameters()) {
          if (!parameter.requires_grad() || parameter.numel() == 0) continue;
          EXPECT_TRUE(InArena(parameter)) << "stage " << stage << ", shape " << parameter.sizes();
        }
      }
    });
  }
}

// Other ranks read it where it lies.
TEST(ZeroEdgesTest, OverShmNothingIsCopiedToBeSent) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << BackendUnderTest() << " has no arena";
  const ZeroOptions in_16_bits = {.stage = 2, .gradient_dtype = at::kBFloat16};
  for (const ZeroOptions& options : {ZeroOptions{.stage = 1}, ZeroOptions{.stage = 2},
                                     ZeroOptions{.stage = 2, .bucket_cap_mb = 0.02}, in_16_bits}) {
    RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
      Training run(group, Optimizers()[0].make, options);
      for (int step = 0; step < 3; ++step) {
        const SentTensors sent;
        run.Step(step);
        std::set<std::string> operations;
        for (const SentTensors::Tensor& tensor : sent.OfAtLeast(4096)) {
          operations.insert(tensor.operation);
          EXPECT_TRUE(tensor.in_arena)
              << tensor.bytes << " bytes of " << tensor.operation << ", stage " << options.stage;
        }
        EXPECT_EQ(operations.size(), 2);  // of gradients and of parameters
      }
    });
  }
}

// Divides a gradient by its norm: an optimizer that looks at whole tensors.
struct NormalizedOptions : torch::optim::OptimizerCloneableOptions<NormalizedOptions> {
  double lr = 0.5;
};

class Normalized : public torch::optim::Optimizer {
 public:
  Normalized(std::vector<torch::optim::OptimizerParamGroup> groups,
             const NormalizedOptions& defaults)
      : Optimizer(std::move(groups), std::make_unique<NormalizedOptions>(defaults)) {}

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    ++steps;
    for (auto& group : param_groups_) {
      const double lr = static_cast<NormalizedOptions&>(group.options()).lr;
      for (at::Tensor& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        if (gradient.defined()) parameter.sub_(gradient / gradient.norm() * lr);
      }
    }
    return {};
  }

  int steps = 0;
};

TEST(ZeroEdgesTest, WhatLooksAtWholeTensorsGetsWholeTensors) {
  at::Tensor one = at::ones({4}).requires_grad_();
  const auto make = optim::FactoryOf<Normalized>(NormalizedOptions());
  const auto flat = ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{one}, nullptr, make);
  ASSERT_FALSE(flat.ok());
  EXPECT_TRUE(absl::StrContains(flat.status().message(), "Normalized")) << flat.status();
  EXPECT_TRUE(absl::StrContains(flat.status().message(), "use zero.partition=tensor"));
  for (const int64_t stage : {1, 2}) {
    RunRanks(3, [&](int, const GroupPtr& group) {
      std::vector<at::Tensor> parameters, expected;
      for (const int64_t size : {300, 7, 50, 200}) {
        parameters.push_back(at::linspace(0, 1, size).requires_grad_());
        const at::Tensor gradient = at::linspace(1, 2, size);
        expected.push_back(parameters.back().detach() - gradient / gradient.norm() * 0.5);
      }
      auto optimizer = *ZeroRedundancyOptimizer::Create(parameters, group, make,
                                                        {.stage = stage, .partition = "tensor"});
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& parameter : parameters) {
        loss = loss + (parameter * at::linspace(1, 2, parameter.numel())).sum();
      }
      loss.backward();
      optimizer->step();
      EXPECT_EQ(dynamic_cast<Normalized&>(optimizer->inner()).steps, 1);
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-6, 1e-6)) << i;
      }
    });
  }
}

// With fp32 copies the inner optimizer updates some millions of elements at a time, if its kind is
// known to have no state but the parameters'.
TEST(ZeroEdgesTest, AnUnknownOptimizerMakesOneStepPerStep) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 3; ++i) {
    parameters.push_back(at::ones({3 << 20}, at::kBFloat16).requires_grad_());
    parameters.back().mutable_grad() = at::ones({3 << 20}, at::kBFloat16);
  }
  auto optimizer = *ZeroRedundancyOptimizer::Create(
      parameters, nullptr, optim::FactoryOf<Normalized>(NormalizedOptions()),
      {.stage = 1, .partition = "tensor"});
  optimizer->step();
  EXPECT_EQ(dynamic_cast<Normalized&>(optimizer->inner()).steps, 1);
}

TEST(ZeroEdgesTest, AParameterThatIsUnfrozenLaterIsRefusedByNumber) {
  at::Tensor a = at::ones({4}).requires_grad_(), frozen = at::ones({4});
  auto optimizer =
      *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a, frozen}, nullptr, Sgd(1));
  a.mutable_grad() = at::ones({4});
  optimizer->step();
  frozen.requires_grad_();
  frozen.mutable_grad() = at::ones({4});
  EXPECT_TRUE(absl::StrContains(Thrown([&] { optimizer->step(); }), "parameter 1 was frozen"));
}

TEST(ZeroEdgesTest, SparseGradientsAreRefusedByNumber) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 4).sparse(true));
      auto optimizer =
          *ZeroRedundancyOptimizer::Create(table->parameters(), group, Sgd(1), {.stage = stage});
      const std::string error = Thrown([&] {
        table->forward(at::tensor({1, 2}, at::kLong)).sum().backward();
        optimizer->step();
      });
      EXPECT_TRUE(absl::StrContains(error, "parameter 0 has a sparse gradient")) << error;
    });
  }
}

TEST(ZeroEdgesTest, MixedDtypesStridesAndOrder) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      at::Tensor single = at::ones({3, 5}).requires_grad_();
      at::Tensor both = at::ones({40}, at::kDouble).requires_grad_();
      at::Tensor transposed = at::arange(24, at::kFloat).view({4, 6}).t().requires_grad_();
      at::Tensor gaps = at::ones({6, 8}).slice(1, 0, 8, 2).detach().requires_grad_();
      std::vector<at::Tensor> all = {single, both, transposed, gaps};
      std::vector<at::Tensor> before;
      for (const at::Tensor& tensor : all) before.push_back(tensor.detach().clone());
      auto optimizer = *ZeroRedundancyOptimizer::Create(all, group, Sgd(0.5), {.stage = stage});
      for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], before[i]));
      EXPECT_EQ(transposed.stride(0), 1);  // stays as it was
      const double mine = stage == 2 ? rank + 1.0 : (group->getSize() + 1) / 2.0;
      const at::Tensor factor = at::arange(24, at::kFloat).view({6, 4});
      (single.sum() * mine + (both.sum() * mine).to(at::kFloat) +
       (transposed * factor).sum() * mine + (gaps * factor).sum() * mine)
          .backward();
      optimizer->step();
      const double mean = (group->getSize() + 1) / 2.0;
      EXPECT_TRUE(at::allclose(single, before[0] - 0.5 * mean));
      EXPECT_TRUE(at::allclose(both, before[1] - 0.5 * mean));
      EXPECT_TRUE(at::allclose(transposed, before[2] - 0.5 * mean * factor));
      EXPECT_TRUE(at::allclose(gaps, before[3] - 0.5 * mean * factor));
    });
  }
}

TEST(ZeroEdgesTest, ParametersWithoutAGradient) {
  // Stage 1: as they come. The optimizer leaves out what has none, weight decay included.
  RunRanks(2, [&](int, const GroupPtr& group) {
    at::Tensor used = at::ones({50}).requires_grad_(), idle = at::ones({50}).requires_grad_();
    const auto make = optim::FactoryOf<torch::optim::SGD>(SGDOptions(1).weight_decay(0.5));
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{used, idle}, group,
                                                      make, {.stage = 1});
    used.sum().backward();
    optimizer->step();
    EXPECT_TRUE(at::equal(used, at::full({50}, -0.5f)));
    EXPECT_TRUE(at::equal(idle, at::ones({50})));
  });
  // Stage 2: one rank's gradient counts for all; none is an error unless it is allowed.
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    at::Tensor a = at::ones({50}).requires_grad_(), b = at::ones({50}).requires_grad_(),
               c = at::ones({50}).requires_grad_();
    const auto make = optim::FactoryOf<torch::optim::SGD>(SGDOptions(1).weight_decay(0.5));
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a, b, c}, group, make,
                                                      {.stage = 2, .find_unused_parameters = true});
    (rank == 0 ? a.sum() + b.sum() : a.sum()).backward();
    optimizer->step();
    EXPECT_TRUE(at::equal(a, at::full({50}, -0.5f)));
    EXPECT_TRUE(at::equal(b, at::full({50}, 0.0f)));  // 1 - (0.5 + 0.5 * 1)
    EXPECT_TRUE(at::equal(c, at::ones({50})));
  });
  RunRanks(2, [&](int, const GroupPtr& group) {
    at::Tensor a = at::ones({50}).requires_grad_(), b = at::ones({50}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a, b}, group, Sgd(1),
                                                      {.stage = 2});
    const std::string error = Thrown([&] { a.sum().backward(); });
    EXPECT_TRUE(absl::StrContains(error, "these parameters got no gradient in this backward: 1"))
        << error;
  });
}

TEST(ZeroEdgesTest, GroupsAddedLaterAndSchedulers) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      at::Tensor first = at::ones({100}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{first}, group,
                                                        Sgd(1), {.stage = stage});
      torch::optim::StepLR scheduler(*optimizer, /*step_size=*/1, /*gamma=*/0.5);
      first.sum().backward();
      optimizer->step();  // 1 - 1
      optimizer->zero_grad();
      scheduler.step();  // LibTorch's first changes nothing
      scheduler.step();
      at::Tensor second = at::ones({30}).requires_grad_();
      optimizer->add_param_group(
          torch::optim::OptimizerParamGroup({second}, std::make_unique<SGDOptions>(0.25)));
      optimizer->step();  // takes it in
      (first.sum() + second.sum()).backward();
      optimizer->step();  // 0 - 0.5; 1 - 0.25
      EXPECT_TRUE(at::equal(first, at::full({100}, -0.5f)));
      EXPECT_TRUE(at::equal(second, at::full({30}, 0.75f)));
      optimizer->param_groups()[0].params().push_back(at::ones({2}).requires_grad_());
      EXPECT_TRUE(absl::StrContains(Thrown([&] { optimizer->step(); }),
                                    "parameter group 0 has 2 parameters and had 1"));
    });
  }
}

// LibTorch's Adagrad makes its state when it is made, for the parameters that it has then.
TEST(ZeroEdgesTest, AGroupAddedLaterHasItsState) {
  const auto make = optim::FactoryOf<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.5));
  const at::Tensor one = at::ones({100}).requires_grad_(), two = at::ones({30}).requires_grad_();
  const auto alone = make({torch::optim::OptimizerParamGroup({one, two})});
  for (int step = 1; step <= 2; ++step) {
    alone->zero_grad();
    ((one.sum() + two.sum()) * step).backward();
    alone->step();
  }
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      at::Tensor first = at::ones({100}).requires_grad_(), second = at::ones({30}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{first}, group, make,
                                                        {.stage = stage});
      optimizer->add_param_group(torch::optim::OptimizerParamGroup({second}));
      optimizer->step();  // takes it in
      for (int step = 1; step <= 2; ++step) {
        optimizer->zero_grad();
        ((first.sum() + second.sum()) * step).backward();
        optimizer->step();
      }
      EXPECT_TRUE(at::equal(first, one)) << first[0];
      EXPECT_TRUE(at::equal(second, two)) << second[0];
    });
  }
}

// What an unsharded optimizer with fp32 master weights does.
TEST(ZeroEdgesTest, MasterWeightsOfReducedPrecision) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor start = at::linspace(-1, 1, 1003).to(dtype);
    const auto gradient = [&](int step) {
      return (at::arange(1003, at::kFloat) * 0.1 + step).sin().to(dtype) * 1e-2;
    };
    at::Tensor master = start.to(at::kFloat).requires_grad_();
    torch::optim::AdamW reference({master}, torch::optim::AdamWOptions(1e-3));
    at::Tensor rounded;
    for (int step = 0; step < 20; ++step) {
      master.mutable_grad() = gradient(step).to(at::kFloat);
      reference.step();
      rounded = master.detach().to(dtype);
    }
    for (const int64_t stage : {1, 2}) {
      optim::Dict saved = optim::NewDict();
      at::Tensor value_then;
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        at::Tensor parameter = start.clone().requires_grad_();
        auto optimizer = *ZeroRedundancyOptimizer::Create(
            std::vector<at::Tensor>{parameter}, group,
            optim::FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
            {.stage = stage});
        for (int step = 0; step < 20; ++step) {
          (parameter * gradient(step)).sum().backward();
          optimizer->step();
          optimizer->zero_grad();
          if (step != 9) continue;
          auto state = *optimizer->ConsolidateStateDict(ZeroRedundancyOptimizer::kAllRanks);
          if (Records(rank)) {
            saved = c10::IValue(state).deepcopy().toGenericDict();
            value_then = parameter.detach().clone();
          }
        }
        EXPECT_TRUE(at::equal(parameter, rounded)) << dtype << ", stage " << stage;
      });
      // Going on from the saved state, fp32 values included, is not having stopped.
      RunRanks(2, [&](int, const GroupPtr& group) {
        at::Tensor parameter = value_then.clone().requires_grad_();
        auto optimizer = *ZeroRedundancyOptimizer::Create(
            std::vector<at::Tensor>{parameter}, group,
            optim::FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
            {.stage = stage});
        ASSERT_TRUE(optimizer->LoadStateDict(saved).ok());
        for (int step = 10; step < 20; ++step) {
          (parameter * gradient(step)).sum().backward();
          optimizer->step();
          optimizer->zero_grad();
        }
        EXPECT_TRUE(at::equal(parameter, rounded)) << dtype << ", stage " << stage;
      });
    }
  }
}

// As after loading a model: fp32 copies that the state lacks are made anew.
TEST(ZeroEdgesTest, WithAStateWithoutMasterWeightsTheParametersValuesCount) {
  at::Tensor whole = at::ones({100}, at::kBFloat16).requires_grad_();
  const torch::optim::SGD unsharded(std::vector<at::Tensor>{whole}, SGDOptions(1));
  const optim::Dict state = *optim::OptimizerState(unsharded);
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      at::Tensor parameter = at::ones({100}, at::kBFloat16).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                        Sgd(1), {.stage = stage});
      {
        const at::NoGradGuard no_grad;
        parameter.fill_(3);
      }
      const absl::Status loaded = optimizer->LoadStateDict(state);
      ASSERT_TRUE(loaded.ok()) << loaded;
      (parameter * 0).sum().backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter, at::full({100}, 3, at::kBFloat16))) << "stage " << stage;
    });
  }
}

// One parameter, of a module.
struct Bias : torch::nn::Module {
  explicit Bias(float value, int64_t size = 100)
      : bias(register_parameter("bias", at::full({size}, value))) {}
  at::Tensor forward(const at::Tensor& x) { return x + bias.sum(); }
  at::Tensor bias;
};

// They take hooks from parameters, too: without these, gradients would not be averaged.
TEST(ZeroEdgesTest, ValuesLoadedAfterwardsCount) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    auto saved = std::make_shared<Bias>(5);
    saved->to(dtype);
    std::stringstream file;
    torch::save(saved, file);
    for (const int64_t stage : {0, 1, 2}) {
      for (const std::string how : {"load", "copy", "there and back"}) {
        RunRanks(2, [&](int rank, const GroupPtr& group) {
          SCOPED_TRACE(absl::StrCat(c10::toString(dtype), ", stage ", stage, ", ", how));
          auto net = std::make_shared<Bias>(1);
          net->to(dtype);
          auto model = *Wrap(net, group, {.reduce_gradients = stage != 2});
          std::unique_ptr<torch::optim::Optimizer> optimizer;
          if (stage == 0) {
            optimizer = Sgd(1)({torch::optim::OptimizerParamGroup(net->parameters())});
          } else {
            optimizer = *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1),
                                                         {.stage = stage});
          }
          const auto step = [&] {
            model->zero_grad();
            // On average 1.
            (model->forward(at::ones({1})) * (rank == 0 ? 2 : 0)).sum().backward();
            optimizer->step();
          };
          step();
          ASSERT_TRUE(at::equal(net->bias, at::zeros({100}, dtype)));
          if (how == "load") {
            std::stringstream mine(file.str());
            torch::load(net, mine);
          } else {
            const at::NoGradGuard no_grad;
            net->bias.copy_(saved->bias);
            if (how == "there and back") {
              net->to(at::kDouble);
              net->to(dtype);
            }
          }
          for (const float expected : {4, 3}) {
            step();
            EXPECT_TRUE(at::equal(net->bias, at::full({100}, expected, dtype)))
                << net->bias[0] << net->bias[99];
          }
        });
      }
    }
  }
}

TEST(ZeroEdgesTest, AWrappedModuleOfAnotherDtypeIsRefusedByName) {
  RunRanks(2, [](int, const GroupPtr& group) {
    auto net = std::make_shared<Bias>(1);
    auto model = *Wrap(net, group);
    net->to(at::kDouble);
    const std::string error = Thrown([&] { model->forward(at::ones({1})); });
    EXPECT_TRUE(absl::StrContains(error, "parameter 'bias' has another dtype")) << error;
  });
}

// fp32 copies have bits that their parameters lack.
TEST(ZeroEdgesTest, AChangeInPlaceLeavesTheCopiesOfOtherElements) {
  RunRanks(2, [](int, const GroupPtr& group) {
    at::Tensor parameter = at::ones({100}, at::kBFloat16).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                      Sgd(1.0 / 1024), {.stage = 1});
    for (int step = 0; step < 4; ++step) {
      {
        const at::NoGradGuard no_grad;
        parameter[7].fill_(3);
      }
      parameter.sum().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    at::Tensor expected = at::full({100}, 1 - 4.0 / 1024, at::kBFloat16);
    expected[7] = 3;
    EXPECT_TRUE(at::equal(parameter, expected)) << parameter[0] << parameter[7];
  });
}

TEST(ZeroEdgesTest, AnotherDtypeIsRefusedByNumber) {
  for (const int64_t stage : {1, 2}) {
    for (const bool back : {false, true}) {
      if (stage == 1 && back) continue;
      RunRanks(2, [&](int, const GroupPtr& group) {
        auto net = std::make_shared<Bias>(1);
        auto optimizer =
            *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = stage});
        net->to(at::kDouble);
        if (back) net->to(at::kFloat);
        net->forward(at::ones({1})).sum().backward();
        const std::string error = Thrown([&] { optimizer->step(); });
        EXPECT_TRUE(absl::StrContains(error, "parameter 0 was")) << error;
        EXPECT_TRUE(absl::StrContains(error, "after Module::to")) << error;
      });
    }
  }
}

TEST(ZeroEdgesTest, AnOptimizerMadeBeforeWrap) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t stage : {1, 2}) {
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        auto net = std::make_shared<Bias>(static_cast<float>(rank + 2));
        net->to(dtype);
        auto optimizer =
            *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = stage});
        if (stage == 2) {
          const auto twice = Wrap(net, group);
          EXPECT_TRUE(absl::StrContains(twice.status().message(), "reduce_gradients=false"))
              << twice.status();
        }
        auto model = *Wrap(net, group, {.reduce_gradients = stage != 2});
        model->forward(at::ones({1})).sum().backward();
        optimizer->step();
        EXPECT_TRUE(at::equal(net->bias, at::ones({100}, dtype))) << net->bias[rank * 99];
      });
    }
  }
}

// A parameter of its own beside those of a wrapped module.
TEST(ZeroEdgesTest, AParameterThatNobodyAveragesIsWarnedOf) {
  for (const bool averaged : {false, true}) {
    bool has_rank_zero = false;  // over mpi each rank is a process
    testing::internal::CaptureStderr();
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      if (rank == 0) has_rank_zero = true;
      auto net = std::make_shared<Bias>(1);
      auto model = *Wrap(net, group);
      at::Tensor temperature = at::ones({1}).requires_grad_(!averaged);
      auto parameters = net->parameters();
      parameters.push_back(temperature);
      auto optimizer = *ZeroRedundancyOptimizer::Create(parameters, group, Sgd(1), {.stage = 1});
      for (int step = 0; step < 2; ++step) {
        (model->forward(at::ones({1})).sum() * temperature).sum().backward();
        optimizer->step();
      }
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(absl::StrContains(log, "averages the gradients of parameters 1,"),
              has_rank_zero && !averaged)
        << log;
  }
}

struct NoHook : c10d::CommHookInterface {
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket&) override { return nullptr; }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }
};

TEST(ZeroEdgesTest, AGradientThatNobodyWouldAverageIsRefusedByNumber) {
  // The optimizer first.
  RunRanks(2, [](int, const GroupPtr& group) {
    auto net = std::make_shared<Bias>(1);
    auto optimizer =
        *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 1});
    auto model = *Wrap(net, group, {.reduce_gradients = false});
    model->forward(at::ones({1})).sum().backward();
    const std::string error = Thrown([&] { optimizer->step(); });
    EXPECT_TRUE(absl::StrContains(error, "nobody would average the gradient of parameter 0"))
        << error;
  });
  RunRanks(2, [](int, const GroupPtr& group) {
    auto net = std::make_shared<Bias>(1);
    auto model = *Wrap(net, group, {.reduce_gradients = false});
    const auto refused =
        ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 1});
    EXPECT_TRUE(absl::StrContains(refused.status().message(),
                                  "nobody would average the gradient of parameter 0"))
        << refused.status();
    // Nor would a hook of communication have an effect, or what clips whole gradients.
    const absl::Status hook =
        model->parallel().register_comm_hook(std::make_unique<NoHook>(), "none");
    EXPECT_TRUE(absl::StrContains(hook.message(), "reduces no gradients")) << hook;
    auto sharded = *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 2});
    EXPECT_TRUE(absl::StrContains(Thrown([&] { clip_grad_norm_(net->parameters(), 1); }),
                                  "call the optimizer's"));
    EXPECT_TRUE(absl::StrContains(Thrown([&] { sharded->clip_grad_norm_(1, -1); }), "norm_type"));
  });
}

TEST(ZeroEdgesTest, AGradientThatTwoReduceIsRefusedByNumber) {
  RunRanks(2, [](int, const GroupPtr& group) {
    auto net = std::make_shared<Bias>(1);
    {
      auto model = *Wrap(net, group);
      const auto refused =
          ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 2});
      EXPECT_TRUE(absl::StrContains(refused.status().message(),
                                    "the gradient of parameter 0 is reduced by"))
          << refused.status();
    }
    auto one = *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 2});
    const auto other =
        ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), {.stage = 2});
    EXPECT_TRUE(absl::StrContains(other.status().message(), "parameter 0 belongs to another"))
        << other.status();
  });
}

TEST(ZeroEdgesTest, InfiniteGradientsOfASkippedStepAreDropped) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    at::Tensor parameter = at::ones({100}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                      Sgd(1), {.stage = 2});
    const double infinity = std::numeric_limits<double>::infinity();
    (parameter * (rank == 0 ? infinity : 1)).sum().backward();
    EXPECT_TRUE(optimizer->unscale_(1));
    parameter.sum().backward();
    EXPECT_FALSE(optimizer->unscale_(1));
    optimizer->step();
    EXPECT_TRUE(at::equal(parameter, at::zeros({100}))) << parameter[0];
  });
}

TEST(ZeroEdgesTest, WhatIsBeingGatheredIsNotRead) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      // One unit more than ranks: the remainder is copied when the gather is waited for.
      at::Tensor parameter = at::ones({48}).requires_grad_();
      auto optimizer =
          *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group, Sgd(1),
                                           {.stage = stage, .overlap_gather = true});
      parameter.sum().backward();
      optimizer->step();
      const auto can_refuse = []<typename Storage>(Storage*) {  // LibTorch 2.15 and later
        return requires(Storage storage) { storage.clear_data_ptr_access_error_msg_(); };
      };
      if (can_refuse(parameter.storage().unsafeGetStorageImpl())) {
        EXPECT_TRUE(absl::StrContains(Thrown([&] { parameter.sum(); }), "WaitForParameters"));
      }
      optimizer->WaitForParameters();
      EXPECT_TRUE(at::equal(parameter, at::zeros({48})));
      optimizer->zero_grad();
      parameter.sum().backward();
      optimizer->step();
      optimizer.reset();
      EXPECT_TRUE(at::equal(parameter, at::full({48}, -1.0f))) << "rank " << rank;
    });
  }
}

// Registered in the order of use, in reverse, and shuffled.
TEST(ZeroEdgesTest, BucketsAdaptToTheOrderInWhichGradientsArrive) {
  constexpr int64_t kLayers = 12, kSize = 4096;
  for (const std::string order : {"in order", "reversed", "shuffled"}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      std::vector<at::Tensor> layers, registered;
      // Elements differ by layer and place, and are exact in all sums.
      std::vector<at::Tensor> gradients;
      for (int64_t i = 0; i < kLayers; ++i) {
        layers.push_back(at::full({kSize}, static_cast<float>(i)).requires_grad_());
        gradients.push_back(at::arange(kSize, at::kFloat) / kSize + (i + 1));
      }
      const auto backward = [&] {
        at::Tensor y = at::ones({kSize});
        for (int64_t i = 0; i < kLayers; ++i) y = y + layers[i] * gradients[i];
        y.sum().backward();
      };
      std::vector<int64_t> arrival;  // of the last layer first
      for (int64_t i = 0; i < kLayers; ++i) {
        const int64_t layer = order == "in order"   ? i
                              : order == "reversed" ? kLayers - 1 - i
                                                    : i * 5 % kLayers;
        registered.push_back(layers[layer]);
      }
      for (int64_t layer = kLayers - 1; layer >= 0; --layer) {
        for (int64_t i = 0; i < kLayers; ++i) {
          if (registered[i].is_same(layers[layer])) arrival.push_back(i);
        }
      }
      // Two layers make up a bucket.
      const double bucket_cap_mb = 2 * kSize * 4 / 1048576.0;
      auto optimizer = *ZeroRedundancyOptimizer::Create(
          registered, group, Sgd(1), {.stage = 2, .bucket_cap_mb = bucket_cap_mb});
      const MemoryPlan plan = PlanMemory(
          {{.numels = std::vector<int64_t>(kLayers, kSize)}},
          {.world_size = 2, .stage = 2, .bucket_cap_mb = bucket_cap_mb, .arrival = arrival});
      std::vector<int64_t> held;
      for (int step = 0; step < 3; ++step) {
        backward();
        held.push_back(optimizer->peak_held_bytes());
        optimizer->step();
      }
      EXPECT_EQ(optimizer->peak_bucket_bytes(), 2 * 2 * kSize * 4) << order;
      EXPECT_EQ(plan.buckets, 2 * 2 * kSize * 4) << order;
      EXPECT_EQ(held[0], plan.held_in_first_backward) << order;
      EXPECT_EQ(held[1], plan.held) << order;
      EXPECT_EQ(held[2], plan.held) << order;
      if (order == "shuffled") {
        EXPECT_GT(plan.held, 0);
      } else {
        EXPECT_EQ(plan.held, 0) << order;
        EXPECT_EQ(held[0] > 0, order == "reversed") << held[0];
      }
      for (int64_t i = 0; i < kLayers; ++i) {
        EXPECT_TRUE(at::equal(layers[i], i - 3 * gradients[i])) << order << i;
      }

      // A resumed run, which begins with the order, holds no more in its first backward either.
      EXPECT_EQ(optimizer->bucket_order(), arrival) << order;
      optimizer.reset();
      auto resumed = *ZeroRedundancyOptimizer::Create(registered, group, Sgd(1),
                                                      {.stage = 2, .bucket_cap_mb = bucket_cap_mb});
      resumed->RestoreBucketOrder({kLayers});  // no parameter of this
      EXPECT_TRUE(resumed->bucket_order().empty());
      resumed->RestoreBucketOrder(arrival);
      backward();
      EXPECT_EQ(resumed->peak_held_bytes(), plan.held) << order;
      resumed->step();
      EXPECT_EQ(resumed->bucket_order(), arrival) << order;
      for (int64_t i = 0; i < kLayers; ++i) {
        EXPECT_TRUE(at::equal(layers[i], i - 4 * gradients[i])) << order << i;
      }
    });
  }
}

// Elements of fp16 and bf16 have one size, but their buckets are not shared.
TEST(ZeroEdgesTest, EachDtypeHasTwoBuckets) {
  constexpr int64_t kSize = 4096, kBucketBytes = kSize * 2, kEach = 3;
  std::vector<PlannedRange> ranges;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    ranges.push_back({.numels = std::vector<int64_t>(kEach, kSize),
                      .element_bytes = 2,
                      .dtype = static_cast<int>(dtype)});
  }
  const double bucket_cap_mb = kBucketBytes / 1048576.0;  // a bucket for each parameter
  const MemoryPlan plan =
      PlanMemory(ranges, {.world_size = 2, .stage = 2, .bucket_cap_mb = bucket_cap_mb});
  EXPECT_EQ(plan.buckets, 2 * 2 * kBucketBytes);
  RunRanks(2, [&](int, const GroupPtr& group) {
    std::vector<at::Tensor> parameters;
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      for (int64_t i = 0; i < kEach; ++i) {
        parameters.push_back(at::ones({kSize}, dtype).requires_grad_());
      }
    }
    auto optimizer = *ZeroRedundancyOptimizer::Create(parameters, group, Sgd(1),
                                                      {.stage = 2, .bucket_cap_mb = bucket_cap_mb});
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : parameters) loss = loss + parameter.to(at::kFloat).sum();
    loss.backward();
    optimizer->step();
    EXPECT_GT(optimizer->peak_bucket_bytes(), 2 * kBucketBytes);
    EXPECT_LE(optimizer->peak_bucket_bytes(), plan.buckets);
    for (const at::Tensor& parameter : parameters) {
      EXPECT_TRUE(at::equal(parameter, at::zeros_like(parameter)));
    }
  });
}

// Gradients arrive on each rank in an order of its own, as of a graph that depends on the data. All
// reduce the same bucket at a time.
TEST(ZeroEdgesTest, BucketsHaveRankZerosOrderWhateverTheOthersHave) {
  constexpr int64_t kSize = 4096;
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    at::Tensor a = at::zeros({kSize}).requires_grad_(), b = at::zeros({kSize}).requires_grad_();
    const at::Tensor of_a = at::arange(kSize, at::kFloat) / kSize + 1, of_b = of_a + 2;
    auto optimizer = *ZeroRedundancyOptimizer::Create(
        std::vector<at::Tensor>{a, b}, group, Sgd(1),
        {.stage = 2, .bucket_cap_mb = kSize * 4 / 1048576.0});  // a bucket for each
    for (int step = 1; step <= 3; ++step) {
      // What is computed last has its gradient first.
      at::Tensor loss = at::zeros({});
      if (rank == 0) loss = loss + (a * of_a).sum();
      loss = loss + (b * of_b).sum();
      if (rank == 1) loss = loss + (a * of_a).sum();
      loss.backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(a, -step * of_a)) << a[0] << a[kSize - 1];
      EXPECT_TRUE(at::equal(b, -step * of_b)) << b[0] << b[kSize - 1];
    }
  });
}

TEST(ZeroEdgesTest, AnInfinityOnOneRankIsFoundByAll) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      at::Tensor parameter = at::ones({100}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                        Sgd(1), {.stage = stage});
      (parameter * 8).sum().backward();
      EXPECT_FALSE(optimizer->unscale_(0.25));
      optimizer->clip_grad_value_(1.5);
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter, at::full({100}, -0.5f)));
      optimizer->zero_grad();
      at::Tensor factor = at::ones({100});
      // In rank 1's part, which in stage 2 it alone has. Nothing reduces gradients of stage 1 here.
      if (stage == 2 || rank == 1) factor[99] = std::numeric_limits<float>::infinity();
      (parameter * factor).sum().backward();
      EXPECT_TRUE(optimizer->unscale_(1));
      optimizer->zero_grad();  // the step is left out
      parameter.sum().backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter, at::full({100}, -1.5f)));
    });
  }
}

// Not only this rank's part: others look at .grad, too.
TEST(ZeroEdgesTest, InStageOneWholeGradientsAreMultipliedAndClipped) {
  RunRanks(2, [](int, const GroupPtr& group) {
    at::Tensor parameter = at::ones({100}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                      Sgd(1), {.stage = 1});
    parameter.mutable_grad() = at::full({100}, 8.0f);
    EXPECT_FALSE(optimizer->unscale_(0.5));
    optimizer->MultiplyGradients(0.25);
    EXPECT_TRUE(at::equal(parameter.grad(), at::ones({100})));
    optimizer->step();
    EXPECT_TRUE(at::equal(parameter, at::zeros({100})));
    parameter.mutable_grad() = at::full({100}, 8.0f);
    optimizer->clip_grad_value_(2);
    EXPECT_TRUE(at::equal(parameter.grad(), at::full({100}, 2.0f)));
    EXPECT_EQ(optimizer->clip_grad_norm_(1), 2 * 10);
    EXPECT_LE(clip_grad_norm_({parameter}, 1), 1);
  });
}

TEST(ZeroEdgesTest, ClippingByOtherNormsAndNonFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 3.0, infinity}) {
    at::Tensor whole = at::ones({1000}).requires_grad_();
    whole.mutable_grad() = at::linspace(-2, 3, 1000);
    const double expected = clip_grad_norm_({whole}, 0.7, p);
    RunRanks(2, [&](int, const GroupPtr& group) {
      at::Tensor parameter = at::zeros({1000}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{parameter}, group,
                                                        Sgd(1), {.stage = 1});
      parameter.mutable_grad() = at::linspace(-2, 3, 1000);
      EXPECT_EQ(optimizer->clip_grad_norm_(0.7, p), expected);
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter, -whole.grad()));
      parameter.mutable_grad() = at::full({1000}, std::numeric_limits<float>::quiet_NaN());
      EXPECT_TRUE(absl::StrContains(
          Thrown([&] { optimizer->clip_grad_norm_(1, p, /*error_if_nonfinite=*/true); }), "nan"));
    });
  }
}

}  // namespace
}  // namespace ddp::zero
