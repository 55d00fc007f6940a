// For tests of this folder: a module of all kinds of parameters, and its training with or without
// sharding.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/ATen.h"
#include "ddp/clip_grad.h"
#include "ddp/nets_testing.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "gtest/gtest.h"
#include "optim/fused.h"
#include "torch/nn/modules/conv.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"

namespace ddp::zero {

// Sizes that fit no unit, a channels-last weight, a frozen parameter, an empty one.
struct MixedNet : torch::nn::Module {
  MixedNet() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)));
    hidden = register_module("hidden", torch::nn::Linear(5 * 4 * 4, 301));
    frozen = register_parameter("frozen", at::full({7}, 0.5f), /*requires_grad=*/false);
    empty = register_parameter("empty", at::empty({0, 3}));
    out = register_module("out", torch::nn::Linear(301, 3));
    const at::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = conv->forward(x).tanh().flatten(1);
    return out->forward(hidden->forward(y).tanh()) * frozen.sum() + empty.sum();
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  at::Tensor frozen, empty;
};

// Examples `begin` to `end` of one batch, the same for all world sizes.
inline at::Tensor Examples(int step, int64_t begin, int64_t end) {
  const at::Tensor all =
      (at::arange(12 * 3 * 4 * 4, at::kFloat) * 0.37 + step).sin().view({12, 3, 4, 4});
  return all.slice(0, begin, end);
}

inline at::Tensor Loss(MixedNet& net, const at::Tensor& examples) {
  return net.forward(examples).pow(2).mean();
}

inline optim::OptimizerFactory Sgd(double lr) {
  return optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(lr));
}

// The message of what `body` throws; empty if it throws nothing.
template <typename Body>
std::string Thrown(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Makes an optimizer of any parameters, sharded or not.
using MakeOptimizer = optim::OptimizerFactory;

struct NamedOptimizer {
  std::string name;
  MakeOptimizer make;
};

inline std::vector<NamedOptimizer> Optimizers() {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const auto adam = AdamOptions(1e-2).weight_decay(0.01);
  const auto amsgrad = AdamOptions(1e-2).amsgrad(true);
  const auto adamw = AdamWOptions(1e-2).weight_decay(0.1);
  const auto sgd = SGDOptions(1e-2).momentum(0.9).weight_decay(0.01);
  return {{"Adam", optim::FactoryOf<torch::optim::Adam>(adam)},
          {"FusedAdam", optim::FactoryOf<optim::FusedAdam>(amsgrad)},
          {"AdamW", optim::FactoryOf<torch::optim::AdamW>(adamw)},
          {"FusedAdamW", optim::FactoryOf<optim::FusedAdamW>(adamw)},
          {"SGD", optim::FactoryOf<torch::optim::SGD>(sgd)},
          {"FusedSGD", optim::FactoryOf<optim::FusedSGD>(sgd)},
          {"Adagrad", optim::FactoryOf<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))},
          {"RMSprop", optim::FactoryOf<torch::optim::RMSprop>(
                          torch::optim::RMSpropOptions(1e-3).momentum(0.5).centered(true))}};
}

// Two groups, so that ranges interleave: matrices, and one-dimensional parameters at half the
// learning rate.
inline std::vector<torch::optim::OptimizerParamGroup> Groups(const torch::nn::Module& net) {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& parameter : net.parameters()) {
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  return {torch::optim::OptimizerParamGroup(matrices), torch::optim::OptimizerParamGroup(vectors)};
}

// Gives all groups options that no other optimizer of these tests has, and the same entries of
// state: a state that is loaded brings all of its own.
inline void SpoilOptions(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) {
    torch::optim::OptimizerOptions* options = &group.options();
    options->set_lr(1);
    if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(options)) {
      adam->betas(std::make_tuple(0.5, 0.6)).eps(0.1).weight_decay(0.7);
    } else if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(options)) {
      adamw->betas(std::make_tuple(0.5, 0.6)).eps(0.1).weight_decay(0.7);
    } else if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(options)) {
      sgd->momentum(0.3).dampening(0.2).weight_decay(0.7);
    } else if (auto* adagrad = dynamic_cast<torch::optim::AdagradOptions*>(options)) {
      adagrad->lr_decay(0.3).eps(0.1).weight_decay(0.7);
    } else if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(options)) {
      rmsprop->momentum(0.3).alpha(0.4).eps(0.1).weight_decay(0.7);
    } else {
      ADD_FAILURE() << "an optimizer of another kind";
    }
  }
}

// One rank's training, of stage 0, 1 or 2.
class Training {
 public:
  Training(const GroupPtr& group, const MakeOptimizer& make, const ZeroOptions& options)
      : group_(group), stage_(static_cast<int>(options.stage)), net(SeededNet<MixedNet>()) {
    model_ = *Wrap(net, group, {.gradient_as_bucket_view = true, .reduce_gradients = stage_ != 2});
    if (stage_ == 0) {
      optimizer_ = make(Groups(*net));
    } else {
      auto made = ZeroRedundancyOptimizer::Create(Groups(*net), group, make, options);
      EXPECT_TRUE(made.ok()) << made.status();
      zero = made->get();
      optimizer_ = *std::move(made);
    }
    optimizer_->param_groups()[1].options().set_lr(5e-3);
  }

  // The same global batch for all world sizes, in `parts` backwards of a rank.
  double Step(int step, std::optional<double> clip = std::nullopt, int parts = 1) {
    const int ranks = group_ ? group_->getSize() : 1, rank = group_ ? group_->getRank() : 0;
    const int64_t each = 12 / ranks / parts;
    double total = 0;
    for (int part = 0; part < parts; ++part) {
      const bool last = part + 1 == parts;
      model_->parallel().set_require_backward_grad_sync(last);
      const int64_t begin = (rank * parts + part) * each;
      model_->parallel().PreForward();
      at::Tensor loss = Loss(*net, Examples(step, begin, begin + each)) / parts;
      model_->parallel().PostForward({});
      loss.backward();
      total += loss.item<double>();
    }
    if (clip) {
      norms.push_back(zero != nullptr ? zero->clip_grad_norm_(*clip)
                                      : ddp::clip_grad_norm_(All(), *clip));
    }
    optimizer_->step();
    if (zero != nullptr) {
      zero->zero_grad();
    } else {
      model_->zero_grad();
    }
    return total;
  }

  std::vector<at::Tensor> All() const {
    std::vector<at::Tensor> all;
    for (const auto& group : optimizer_->param_groups()) {
      all.insert(all.end(), group.params().begin(), group.params().end());
    }
    return all;
  }

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  DistributedDataParallel<MixedNet>& model() { return *model_; }

 private:
  GroupPtr group_;
  int stage_;
  std::shared_ptr<DistributedDataParallel<MixedNet>> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;

 public:
  std::shared_ptr<MixedNet> net;
  ZeroRedundancyOptimizer* zero = nullptr;  // stages 1 and 2
  std::vector<double> norms;
};

inline std::vector<at::Tensor> Values(const torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : module.parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

inline void ExpectSameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                           const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ": tensor " << i << " differs by at most "
                                       << (a[i] - b[i]).abs().max().item<double>();
  }
}

inline void ExpectWithin(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                         double tolerance, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() == 0) continue;
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), tolerance) << what << ": tensor " << i;
  }
}

}  // namespace ddp::zero
