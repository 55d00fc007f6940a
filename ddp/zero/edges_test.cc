// Parameters of all kinds, late groups, precision, and what is refused by name.

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/zero/zero_testing.h"
#include "optim/state_dict.h"
#include "torch/nn/modules/embedding.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/schedulers/step_lr.h"

namespace ddp::zero {
namespace {

using torch::optim::SGDOptions;

optim::OptimizerFactory Sgd(double lr) {
  return optim::FactoryOf<torch::optim::SGD>(SGDOptions(lr));
}

template <typename Body>
std::string Thrown(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

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
          auto state = *optimizer->ConsolidateStateDict(0);
          if (rank == 0) {
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

TEST(ZeroEdgesTest, AnInfinityOnOneRankIsFoundByAll) {
  for (const int64_t stage : {1, 2}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
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
      factor[99] = std::numeric_limits<float>::infinity();  // rank 1's
      (parameter * factor).sum().backward();
      EXPECT_TRUE(optimizer->unscale_(1));
      optimizer->zero_grad();  // the step is left out
      parameter.sum().backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(parameter, at::full({100}, -1.5f)));
    });
  }
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
