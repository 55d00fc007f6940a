// Backwards that end early, run within each other, or reach no parameter, in stage 2.

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/zero/zero_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"

namespace ddp::zero {
namespace {

TEST(ZeroBackwardsTest, AfterAnExceptionInBackward) {
  RunRanks(2, [](int, const GroupPtr& group) {
    at::Tensor first = at::ones({100}).requires_grad_(), last = at::ones({100}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{first, last}, group,
                                                      Sgd(1), {.stage = 2, .bucket_cap_mb = 1e-4});
    bool fails = true;
    first.register_hook([&](const at::Tensor&) {
      if (fails) throw std::runtime_error("a bad batch");
    });
    // The gradient of `last` comes first, and some of its buckets are sent.
    const auto backward = [&] {
      const at::Tensor sum = first.sum();
      (sum + last.sum()).backward();
    };
    for (const bool accumulated : {false, true}) {
      fails = false;
      if (accumulated) backward();
      fails = true;
      EXPECT_TRUE(absl::StrContains(Thrown(backward), "a bad batch"));
      fails = false;
      for (const std::string& error :
           {Thrown([&] { optimizer->step(); }), Thrown([&] { optimizer->clip_grad_norm_(1); }),
            Thrown(backward)}) {
        EXPECT_TRUE(absl::StrContains(error, "ended with an exception")) << error;
        EXPECT_TRUE(absl::StrContains(error, "zero_grad()")) << error;
      }
      optimizer->zero_grad();
      const at::Tensor before = first.detach().clone();
      backward();
      optimizer->step();
      for (const at::Tensor& parameter : {first, last}) {
        EXPECT_TRUE(at::equal(parameter, before - 1)) << parameter[0];
      }
    }
  });
}

// Its backward runs another one, which reaches a parameter.
class Reentrant : public torch::autograd::Function<Reentrant> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& parameter) {
    context->save_for_backward({parameter});
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::AutoGradMode enable_grad(true);
    context->get_saved_variables()[0].sum().backward();
    return {gradients[0], at::Tensor()};
  }
};

TEST(ZeroBackwardsTest, ABackwardWithinABackwardIsRefusedByName) {
  RunRanks(2, [](int, const GroupPtr& group) {
    for (const bool inner_first : {false, true}) {
      at::Tensor a = at::ones({100}).requires_grad_(), b = at::ones({100}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a, b}, group,
                                                        Sgd(1), {.stage = 2});
      const at::Tensor x = at::ones({1}).requires_grad_();
      const std::string error = Thrown([&] {
        if (inner_first) {
          const at::Tensor outer = b.sum();
          (outer + Reentrant::apply(x * 1, a)).backward();
        } else {
          const at::Tensor inner = Reentrant::apply(x * 1, a);
          (inner + b.sum()).backward();
        }
      });
      EXPECT_TRUE(absl::StrContains(error, "within")) << error;
      EXPECT_TRUE(absl::StrContains(error, "use zero.stage=1")) << error;
    }
  });
}

// A head that only some ranks use, and a rank whose backward reaches no parameter at all.
TEST(ZeroBackwardsTest, ABackwardThatReachesNoParameter) {
  struct Experts : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x, bool uses) { return uses ? (x * head).sum() : x.sum(); }
    at::Tensor head{register_parameter("head", at::ones({100}))};
  };
  // The optimizer's option counts, whatever the wrapper's is.
  for (const bool of_wrapper : {true, false}) {
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      const ZeroOptions options = {.stage = 2, .find_unused_parameters = true};
      auto net = std::make_shared<Experts>();
      auto model =
          *Wrap(net, group, {.find_unused_parameters = of_wrapper, .reduce_gradients = false});
      auto optimizer = *ZeroRedundancyOptimizer::Create(net->parameters(), group, Sgd(1), options);
      const at::Tensor x = at::full({100}, 2.0f).requires_grad_();
      // Two backwards per step, of which rank 0's first and rank 1's second reach nothing.
      for (const bool first : {true, false}) model->forward(x, first == (rank == 1)).backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(net->head, at::full({100}, -1.0f))) << net->head[0];
      // grad() is no backward.
      EXPECT_TRUE(torch::autograd::grad({model->forward(x, false)}, {x})[0].defined());
      model->forward(x, rank == 1).backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(net->head, at::full({100}, -2.0f))) << net->head[0];
      // Neither of rank 1's reaches anything: step() alone would make up for one.
      for (int i = 0; i < 2; ++i) model->forward(x, rank == 0).backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(net->head, at::full({100}, -4.0f))) << net->head[0];
    });
  }
  // Without a wrapper, which would know what backward starts from.
  RunRanks(2, [](int rank, const GroupPtr& group) {
    at::Tensor a = at::ones({100}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a}, group, Sgd(1),
                                                      {.stage = 2, .find_unused_parameters = true});
    (rank == 0 ? a.sum() : at::ones({1}).requires_grad_().sum()).backward();
    optimizer->step();
    EXPECT_TRUE(at::equal(a, at::full({100}, 0.5f))) << a[0];
  });
}

// After a step that a scaler has skipped, whose gradients the next backward drops.
TEST(ZeroBackwardsTest, ABackwardThatReachesNoParameterAfterASkippedStep) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    at::Tensor a = at::ones({100}).requires_grad_(), b = at::ones({1}).requires_grad_();
    auto optimizer = *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{a}, group, Sgd(1),
                                                      {.stage = 2, .find_unused_parameters = true});
    const double infinity = std::numeric_limits<double>::infinity();
    for (const double factor : {1.0, infinity, 1.0}) {
      (rank == 0 ? (a * factor).sum() : b.sum()).backward();
      const bool found = optimizer->unscale_(1);
      EXPECT_EQ(found, factor == infinity);
      if (!found) optimizer->step();
    }
    EXPECT_TRUE(at::equal(a, at::zeros({100}))) << a[0];
  });
}

// Of chosen inputs, or of a loss that does not come from the wrapped module.
TEST(ZeroBackwardsTest, BackwardsThatNoHookSees) {
  for (const bool chosen : {true, false}) {
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      at::Tensor a = at::ones({100}).requires_grad_(), b = at::ones({100}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(
          std::vector<at::Tensor>{a}, group, Sgd(1), {.stage = 2, .find_unused_parameters = true});
      const std::vector<at::Tensor> inputs = {a};
      for (int step = 1; step <= 2; ++step) {
        // Rank 1 reaches the parameter once, in the second backward.
        for (const bool reaches : {rank == 0, true}) {
          const at::Tensor loss = reaches ? a.sum() : b.sum();
          if (chosen) {
            optimizer->Backward(loss, inputs);
          } else {
            optimizer->Backward(loss);
          }
        }
        optimizer->step();
        optimizer->zero_grad();
        EXPECT_TRUE(at::equal(a, at::full({100}, 1 - 1.5f * step))) << a[0];
      }
      EXPECT_EQ(b.grad().defined(), !chosen && rank == 1);
    });
  }
}

// Two optimizers of one module: ranks reach different parameters, in different orders.
TEST(ZeroBackwardsTest, TwoOptimizersOfOneModuleWithUnusedParameters) {
  struct Pair : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x, double of_a, double of_b, bool a_first) {
      at::Tensor sum = x.sum();
      for (const bool is_a : {a_first, !a_first}) {
        const double factor = is_a ? of_a : of_b;
        if (factor != 0) sum = sum + ((is_a ? a : b) * factor).sum();
      }
      return sum;
    }
    at::Tensor a{register_parameter("a", at::ones({100}))};
    at::Tensor b{register_parameter("b", at::ones({300}))};
  };
  RunRanks(2, [](int rank, const GroupPtr& group) {
    const auto net = std::make_shared<Pair>();
    auto model = *Wrap(net, group, {.find_unused_parameters = true, .reduce_gradients = false});
    const ZeroOptions options = {.stage = 2, .bucket_cap_mb = 1e-4, .find_unused_parameters = true};
    auto of_a =
        *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{net->a}, group, Sgd(1), options);
    auto of_b =
        *ZeroRedundancyOptimizer::Create(std::vector<at::Tensor>{net->b}, group, Sgd(1), options);
    const at::Tensor x = at::zeros({1}).requires_grad_();
    float a = 1, b = 1;
    const std::vector<std::pair<double, double>> of_rank_1 = {{2, 2}, {2, 0}, {0, 2}, {0, 0}};
    for (const auto& [factor_a, factor_b] : of_rank_1) {
      if (rank == 0) {
        model->forward(x, 4, 4, /*a_first=*/true).backward();
      } else {
        model->forward(x, factor_a, factor_b, /*a_first=*/false).backward();
      }
      of_a->step();
      of_b->step();
      of_a->zero_grad();
      of_b->zero_grad();
      a -= static_cast<float>(4 + factor_a) / 2;
      b -= static_cast<float>(4 + factor_b) / 2;
      EXPECT_TRUE(at::equal(net->a, at::full({100}, a))) << net->a[0];
      EXPECT_TRUE(at::equal(net->b, at::full({300}, b))) << net->b[0];
    }
  });
}

}  // namespace
}  // namespace ddp::zero
