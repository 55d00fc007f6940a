#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/amp/autocast.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/clip_grad.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/nets_testing.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "gtest/gtest.h"
#include "optim/kind.h"
#include "torch/optim/sgd.h"

namespace ddp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::unique_ptr<GradScaler> MakeScaler(const GradScalerOptions& options,
                                       const GroupPtr& group = nullptr) {
  return *GradScaler::Create(options, at::kCPU, group);
}

at::Tensor Parameter(float value) { return at::full({3}, value, at::kFloat).requires_grad_(); }

void SetGradient(const at::Tensor& parameter, float value) {
  parameter.mutable_grad() = at::full_like(parameter.detach(), value);
}

TEST(AutocastTest, ProductsRunInTheDtypeAndTheScopeEnds) {
  const at::Tensor a = at::ones({2, 2}), b = at::ones({2, 2});
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    {
      const Autocast outer(at::kCPU, dtype);
      EXPECT_EQ(at::mm(a, b).scalar_type(), dtype);
      {
        const Autocast inner(at::kCPU, at::kFloat);
        EXPECT_EQ(at::mm(a, b).scalar_type(), at::kFloat);
      }
      EXPECT_EQ(at::mm(a, b).scalar_type(), dtype);
    }
    EXPECT_EQ(at::mm(a, b).scalar_type(), at::kFloat);
  }
  EXPECT_THROW(Autocast(at::kCPU, at::kDouble), c10::Error);
  EXPECT_EQ(at::mm(a, b).scalar_type(), at::kFloat);
}

TEST(AutocastTest, TheEndOfTheOutermostScopeForgetsConvertedParameters) {
  at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const at::Tensor x = at::ones({2, 2});
  for (const float value : {1.0f, 2.0f}) {
    {
      const at::NoGradGuard no_grad;
      weight.fill_(value);
    }
    const Autocast autocast(at::kCPU, at::kBFloat16);
    EXPECT_EQ(at::mm(x, weight)[0][0].item<float>(), 2 * value);
  }
}

TEST(AutocastTest, GradientsOfParametersStayFloat) {
  auto net = SeededNet();
  at::Tensor output;
  {
    const Autocast autocast(at::kCPU, at::kBFloat16);
    output = net->forward(Input(0, 0), true);
  }
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  output.to(at::kFloat).pow(2).sum().backward();
  const std::vector<at::Tensor> expected = ExpectedGradients(1, 0);
  const std::vector<at::Tensor> found = Gradients(*net);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(found[i], expected[i], /*rtol=*/0.05, /*atol=*/0.02)) << i;
  }
}

TEST(GradScalerTest, ASharedParameterIsUnscaledOnceAndAComplexOneToo) {
  const at::Tensor p = Parameter(1);
  const at::Tensor complex = at::ones({2}, at::kComplexFloat).requires_grad_();
  torch::optim::SGD sgd(std::vector<at::Tensor>{p, p, complex}, torch::optim::SGDOptions(1));
  const auto scaler = MakeScaler({.init_scale = 8});
  SetGradient(p, 16);
  complex.mutable_grad() = at::full({2}, c10::complex<float>(8, 16), at::kComplexFloat);
  scaler->unscale_(sgd);
  EXPECT_EQ(p.grad()[0].item<float>(), 2);
  EXPECT_EQ(complex.grad()[1].item<c10::complex<float>>(), c10::complex<float>(1, 2));
}

// As where forward begins with weight.conj().
TEST(GradScalerTest, AComplexGradientMayBeAConjugate) {
  const at::Tensor complex = at::ones({2}, at::kComplexFloat).requires_grad_();
  torch::optim::SGD sgd(std::vector<at::Tensor>{complex}, torch::optim::SGDOptions(1));
  complex.mutable_grad() = at::full({2}, c10::complex<float>(8, 16), at::kComplexFloat).conj();
  ASSERT_TRUE(complex.grad().is_conj());
  MakeScaler({.init_scale = 8})->unscale_(sgd);
  const at::Tensor expected = at::full({2}, c10::complex<float>(1, -2), at::kComplexFloat);
  EXPECT_TRUE(at::equal(complex.grad().resolve_conj(), expected)) << complex.grad();
}

// With and without a scaler, whose division and the factor are one multiplication.
TEST(GradScalerTest, TheFactorOfASharedParameterCountsOnce) {
  for (const bool scales : {false, true}) {
    const at::Tensor p = Parameter(1), q = Parameter(1);
    const auto optimizer =
        MakeReplicated(std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{p, q, p},
                                                           torch::optim::SGDOptions(1)),
                       nullptr, scales ? MakeScaler({.init_scale = 8}) : GradScaler::Disabled());
    for (const at::Tensor& parameter : {p, q}) SetGradient(parameter, scales ? 32 : 4);
    optimizer->unscale_(0.5);
    for (const at::Tensor& parameter : {p, q}) EXPECT_EQ(parameter.grad()[0].item<float>(), 2);
    // A group that is added later takes part.
    const at::Tensor r = Parameter(1);
    SetGradient(r, 4);
    optimizer->optimizer().add_param_group(torch::optim::OptimizerParamGroup({r}));
    optimizer->clip_grad_value_(1);
    for (const at::Tensor& parameter : {p, q, r}) EXPECT_EQ(parameter.grad()[0].item<float>(), 1);
  }
}

TEST(GradScalerTest, ScalesTheLossAndUnscalesTheGradients) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({.init_scale = 1024});
  scaler->scale((p * 3).sum()).backward();
  EXPECT_EQ(p.grad()[0].item<float>(), 3 * 1024);
  scaler->unscale_(sgd);
  EXPECT_EQ(p.grad()[0].item<float>(), 3);
  EXPECT_TRUE(scaler->step(sgd));
  EXPECT_EQ(p[0].item<float>(), 1 - 0.5 * 3);
  scaler->update();
}

TEST(GradScalerTest, ADisabledOneDoesNothing) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = GradScaler::Disabled();
  EXPECT_FALSE(scaler->is_enabled());
  const at::Tensor loss = (p * 3).sum();
  EXPECT_TRUE(scaler->scale(loss).is_same(loss));
  scaler->update();  // in any order
  for (const float gradient : {3.0f, kInfinity}) {
    SetGradient(p, gradient);
    scaler->unscale_(sgd);
    EXPECT_EQ(p.grad()[0].item<float>(), gradient);
    EXPECT_TRUE(scaler->step(sgd));
    scaler->update();
  }
  EXPECT_EQ(p[0].item<float>(), -kInfinity);
  EXPECT_EQ(scaler->get_scale(), 1);
  EXPECT_TRUE(scaler->state_dict().empty());
}

// The default scale is infinite in float16.
TEST(GradScalerTest, ALossIn16BitsIsScaledInFloat32) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor scaled = MakeScaler({})->scale(at::full({}, 2, dtype));
    EXPECT_EQ(scaled.scalar_type(), at::kFloat);
    EXPECT_EQ(scaled.item<float>(), 2 * 65536);
  }
}

TEST(GradScalerTest, AStepWithAnInfinityIsSkippedAndTheScaleHalved) {
  for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    const at::Tensor p = Parameter(1), q = Parameter(1);
    torch::optim::SGD sgd({p, q}, torch::optim::SGDOptions(0.5));
    auto scaler = MakeScaler({.init_scale = 1024});
    SetGradient(p, 1);
    SetGradient(q, 1);
    q.mutable_grad()[2] = bad;
    EXPECT_FALSE(scaler->step(sgd));
    scaler->update();
    EXPECT_EQ(scaler->get_scale(), 512);
    EXPECT_TRUE(at::equal(p.detach(), at::ones({3})));
  }
}

TEST(GradScalerTest, TheScaleGrowsAfterFiniteStepsInARow) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler(
      {.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 2});
  std::vector<double> scales;
  for (const float gradient : {1.0f, 1.0f, 1.0f, kInfinity, 1.0f, 1.0f}) {
    SetGradient(p, gradient);
    scaler->step(sgd);
    scaler->update();
    scales.push_back(scaler->get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 32, 32, 8, 8, 32}));
}

TEST(GradScalerTest, ANaNThatStaysIsAWarningAndThenAnError) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({});
  testing::internal::CaptureStderr();
  std::string error;
  int skipped = 0;
  while (error.empty() && skipped < 1000) {
    SetGradient(p, std::numeric_limits<float>::quiet_NaN());
    EXPECT_FALSE(scaler->step(sgd));
    ++skipped;
    try {
      scaler->update();
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
    }
  }
  const std::string printed = testing::internal::GetCapturedStderr();
  for (const int count : {10, 20, 40, 80}) {
    const std::string words = absl::StrCat("the last ", count, " steps in a row were skipped");
    EXPECT_TRUE(absl::StrContains(printed, words)) << printed;
  }
  EXPECT_FALSE(absl::StrContains(printed, "the last 30 steps")) << printed;
  EXPECT_EQ(skipped, 116);  // from 2^16 to 2^-100
  EXPECT_TRUE(absl::StrContains(error, "the last 116 steps")) << error;
  EXPECT_TRUE(absl::StrContains(error, "Look for NaN")) << error;
  // Gradients that are finite again are taken.
  SetGradient(p, 0);
  EXPECT_TRUE(scaler->step(sgd));
  scaler->update();
}

// As where losses count other numbers than were expected.
TEST(GradScalerTest, ANaNThatStaysIsThisErrorAlsoUnderAFactor) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({});
  std::string error;
  for (int skipped = 0; error.empty() && skipped < 1000; ++skipped) {
    SetGradient(p, std::numeric_limits<float>::quiet_NaN());
    try {
      scaler->unscale_(sgd, 64);
      EXPECT_FALSE(scaler->step(sgd));
      scaler->update();
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
  }
  EXPECT_TRUE(absl::StrContains(error, "Look for NaN")) << error;
}

TEST(GradScalerTest, TheScaleIsAlwaysAFloatWithAnInverse) {
  for (const double scale : {1e-40, 1e39, 0.0, -1.0, std::nan("")}) {
    EXPECT_FALSE(GradScaler::Create({.init_scale = scale}, at::kCPU, nullptr).ok()) << scale;
  }
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({.init_scale = 3e38, .growth_interval = 1});
  for (int i = 0; i < 3; ++i) {
    SetGradient(p, 0);
    EXPECT_TRUE(scaler->step(sgd));
    scaler->update();
    EXPECT_TRUE(std::isfinite(scaler->get_scale()));
  }
}

// The kernel grows the scale only at the interval itself.
TEST(GradScalerTest, AShorterIntervalThanTheTrackerLetsTheScaleGrow) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({.init_scale = 8});
  optim::Dict state = scaler->state_dict();
  state.insert_or_assign("_growth_tracker", int64_t{1500});
  state.insert_or_assign("growth_interval", int64_t{1000});
  ASSERT_TRUE(scaler->load_state_dict(state).ok());
  SetGradient(p, 0);
  scaler->step(sgd);
  scaler->update();
  EXPECT_EQ(scaler->get_scale(), 16);
}

TEST(GradScalerTest, TheStateHasPyTorchsKeysAndGoesOn) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({.init_scale = 8, .growth_interval = 2});
  SetGradient(p, 1);
  scaler->step(sgd);
  scaler->update();
  const optim::Dict state = scaler->state_dict();
  EXPECT_EQ(state.at("scale").toDouble(), 8);
  EXPECT_EQ(state.at("_growth_tracker").toInt(), 1);
  EXPECT_EQ(state.at("growth_interval").toInt(), 2);
  auto other = MakeScaler({});
  ASSERT_TRUE(other->load_state_dict(state).ok());
  SetGradient(p, 1);
  other->step(sgd);
  other->update();
  EXPECT_EQ(other->get_scale(), 16);  // the second finite step in a row

  for (const char* key :
       {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    for (const bool missing : {true, false}) {
      optim::Dict broken = state.copy();
      EXPECT_EQ(broken.erase(key), 1);
      if (!missing) broken.insert(key, -1.0);
      const absl::Status status = other->load_state_dict(broken);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << key;
      EXPECT_EQ(other->get_scale(), 16) << key;
    }
  }
}

TEST(GradScalerTest, CallsOutOfOrderSaySo) {
  const at::Tensor p = Parameter(1);
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
  auto scaler = MakeScaler({});
  EXPECT_THROW(scaler->update(), c10::Error);
  SetGradient(p, 1);
  scaler->unscale_(sgd);
  EXPECT_THROW(scaler->unscale_(sgd), c10::Error);
  scaler->step(sgd);
  EXPECT_THROW(scaler->step(sgd), c10::Error);
  scaler->update();
  const at::Tensor half = at::ones({3}, at::kHalf).requires_grad_();
  half.mutable_grad() = at::ones({3}, at::kHalf);
  torch::optim::SGD of_half({half}, torch::optim::SGDOptions(0.5));
  EXPECT_THROW(scaler->unscale_(of_half), c10::Error);
  auto with_copies = *zero::ZeroRedundancyOptimizer::Create(
      std::vector<at::Tensor>{half}, nullptr,
      optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(0.5)), {.stage = 1});
  EXPECT_THROW(scaler->unscale_(*with_copies), c10::Error);
  EXPECT_FALSE(GradScaler::Create({.growth_factor = 1}, at::kCPU, nullptr).ok());
}

TEST(GradScalerTest, AnInfinityOfOneRankSkipsTheStepOfAll) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    const at::Tensor p = Parameter(1);
    torch::optim::SGD sgd({p}, torch::optim::SGDOptions(0.5));
    auto scaler = MakeScaler({.init_scale = 4}, group);
    SetGradient(p, rank == 1 ? kInfinity : 4);
    EXPECT_FALSE(scaler->step(sgd)) << "rank " << rank;
    scaler->update();
    EXPECT_EQ(scaler->get_scale(), 2);
    SetGradient(p, 2);
    EXPECT_TRUE(scaler->step(sgd));
    EXPECT_EQ(p[0].item<float>(), 0.5);
  });
}

// Each rank checks its own shard.
TEST(GradScalerTest, AnInfinityInOneShardSkipsTheStepOfAll) {
  for (const int stage : {1, 2}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto net = SeededNet();
      auto model = *Wrap(net, group, {.reduce_gradients = stage != 2});
      auto zero = *zero::ZeroRedundancyOptimizer::Create(
          net->parameters(), group,
          optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), {.stage = stage});
      auto scaler = MakeScaler({.init_scale = 256}, group);
      // In one element, of which one rank has the gradient: the others learn of it from the scaler
      // alone. In stage 2 that is the rank whose shard it is in; in stage 1 all ranks have all
      // averaged gradients, so that only one that comes later is one rank's.
      const auto train = [&](bool infinite) {
        const float of_one = infinite && stage == 2 && rank == 0 ? kInfinity : 0;
        const at::Tensor loss =
            model->forward(Input(rank, 0), true).pow(2).sum() + net->second->bias[0] * of_one;
        scaler->scale(loss).backward();
        if (infinite && stage == 1 && rank == 1) {
          net->second->bias.grad().select(0, 0).fill_(kInfinity);
        }
        const bool stepped = scaler->step(*zero);
        scaler->update();
        zero->zero_grad();
        return stepped;
      };
      const at::Tensor before = net->second->weight.detach().clone();
      EXPECT_FALSE(train(true)) << "stage " << stage;
      EXPECT_TRUE(at::equal(net->second->weight.detach(), before));
      EXPECT_TRUE(train(false));
      EXPECT_FALSE(at::equal(net->second->weight.detach(), before));
      EXPECT_EQ(scaler->get_scale(), 128);

      // Against no scaler.
      auto plain = SeededNet();
      auto plain_model = *Wrap(plain, group);
      torch::optim::SGD sgd(plain->parameters(), torch::optim::SGDOptions(0.1));
      plain_model->forward(Input(rank, 0), true).pow(2).sum().backward();
      sgd.step();
      EXPECT_TRUE(at::allclose(net->second->weight.detach(), plain->second->weight.detach()));
    });
  }
}

// As in the example of grad_scaler.h.
TEST(GradScalerTest, ClippingSeesUnscaledGradientsInStageOneToo) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    const auto net = SeededNet(), plain = SeededNet();
    auto model = *Wrap(net, group);
    auto zero = *zero::ZeroRedundancyOptimizer::Create(
        net->parameters(), group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), {.stage = 1});
    auto scaler = MakeScaler({.init_scale = 256}, group);
    scaler->scale(model->forward(Input(rank, 0), true).pow(2).sum()).backward();
    scaler->unscale_(*zero);
    const double norm = clip_grad_norm_(net->parameters(), 0.5);
    EXPECT_TRUE(scaler->step(*zero));
    scaler->update();

    auto plain_model = *Wrap(plain, group);
    torch::optim::SGD sgd(plain->parameters(), torch::optim::SGDOptions(0.1));
    plain_model->forward(Input(rank, 0), true).pow(2).sum().backward();
    EXPECT_NEAR(norm, clip_grad_norm_(plain->parameters(), 0.5), 1e-4 * norm);
    sgd.step();
    ExpectClose(net->parameters(), plain->parameters());
  });
}

// Rank 1 has one batch less. The last one is infinite.
TEST(GradScalerTest, InAJoin) {
  for (const int stage : {0, 1, 2}) {
    for (const bool listed : {true, false}) {
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        SCOPED_TRACE(absl::StrCat("stage ", stage, ", rank ", rank));
        auto net = SeededNet();
        auto model = *Wrap(net, group, {.reduce_gradients = stage != 2});
        const auto make = optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
        auto scaler = MakeScaler({.init_scale = 256}, group);
        std::vector<Joinable*> joinables = {&model->parallel()};
        std::unique_ptr<torch::optim::Optimizer> optimizer;
        if (stage == 0) {
          optimizer = make({torch::optim::OptimizerParamGroup(net->parameters())});
        } else {
          auto zero = *zero::ZeroRedundancyOptimizer::Create(net->parameters(), group, make,
                                                             {.stage = stage});
          joinables.push_back(zero.get());
          optimizer = std::move(zero);
        }
        if (listed) joinables.push_back(scaler.get());
        std::vector<bool> stepped;
        const absl::Status joined = Join(joinables, {}, [&] {
          for (int step = rank; step < 2; ++step) {
            model->zero_grad();
            const at::Tensor loss = model->forward(Input(rank, step), true).pow(2).sum();
            scaler->scale(step == 1 && rank == 0 ? loss * kInfinity : loss).backward();
            stepped.push_back(scaler->step(*optimizer));
            scaler->update();
          }
          return absl::OkStatus();
        });
        if (!listed) {
          EXPECT_TRUE(absl::StrContains(joined.message(), "GradScaler")) << joined;
          EXPECT_TRUE(absl::StrContains(joined.message(), "add it to the list")) << joined;
          return;
        }
        EXPECT_TRUE(joined.ok()) << joined;
        if (rank == 0) {
          EXPECT_EQ(stepped, (std::vector<bool>{true, false}));
        }
        EXPECT_EQ(scaler->get_scale(), 128);
      });
    }
  }
}

// Rank 1 has no batches.
TEST(GradScalerTest, InAJoinAnInfinityThatACallerReplacesSkipsNoStep) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    auto net = SeededNet();
    auto model = *Wrap(net, group);
    auto zero = *zero::ZeroRedundancyOptimizer::Create(
        net->parameters(), group, optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)),
        {.stage = 1});
    auto scaler = MakeScaler({.init_scale = 256}, group);
    const absl::Status joined = Join({&model->parallel(), zero.get(), scaler.get()}, {}, [&] {
      if (rank != 0) return absl::OkStatus();
      const at::Tensor loss = model->forward(Input(rank, 0), true).pow(2).sum();
      scaler->scale(loss * kInfinity).backward();
      for (const at::Tensor& parameter : net->parameters()) parameter.mutable_grad().fill_(128);
      scaler->unscale_(*zero);
      EXPECT_TRUE(scaler->step(*zero));
      scaler->update();
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_EQ(scaler->get_scale(), 256);
    const std::vector<at::Tensor> before = SeededNet()->parameters(), after = net->parameters();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i] - 0.5));
  });
}

TEST(GradScalerTest, InAJoinOneWithoutAGroupSaysSoAndADisabledOneIsLeftOut) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto net = SeededNet();
    auto model = *Wrap(net, group);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    const auto train = [&](GradScaler& scaler, const std::vector<Joinable*>& joinables) {
      return Join(joinables, {}, [&] {
        scaler.scale(model->forward(Input(rank, 0), true).sum()).backward();
        scaler.step(sgd);
        scaler.update();
        return absl::OkStatus();
      });
    };
    const auto lone = MakeScaler({.init_scale = 256});
    absl::Status joined = train(*lone, {&model->parallel()});
    EXPECT_TRUE(absl::StrContains(joined.message(), "give it the group")) << joined;
    joined = train(*lone, {&model->parallel(), lone.get()});
    EXPECT_TRUE(absl::StrContains(joined.message(), "without a group")) << joined;
    const auto disabled = GradScaler::Disabled();
    joined = train(*disabled, {&model->parallel(), disabled.get()});
    EXPECT_TRUE(joined.ok()) << joined;
  });
}

}  // namespace
}  // namespace ddp
