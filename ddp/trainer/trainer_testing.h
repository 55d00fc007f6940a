// For the trainer's tests: a small data set and small models, and ranks as threads over backend
// $DDP_TEST_BACKEND (default gloo).
#pragma once

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/statusor.h"
#include "backends/conformance/rank_threads.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/trainer.h"
#include "optim/kind.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

// Linearly separable points: target 1 if the sum of the input is positive.
class Halves : public data::Dataset {
 public:
  explicit Halves(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    at::Tensor index =
        at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kDouble);
    at::Tensor input = at::stack({(index * 12.9898).sin(), (index * 78.233).sin()}, 1);
    return {input.to(at::kFloat), input.sum(1).gt(0).to(at::kLong)};
  }

 private:
  int64_t n_;
};

struct Line : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
};

inline Task LineTask() {
  auto module = std::make_shared<Line>();
  at::NoGradGuard no_grad;
  module->linear->weight.fill_(0.1);
  module->linear->bias.zero_();
  return Classification("line", module);
}

// Has running statistics, and random numbers if `dropout` is not 0. Ranks as threads share torch's
// generator, so random numbers are reproducible only with a world size of 1.
struct Net : torch::nn::Module {
  explicit Net(double dropout) : drop(register_module("drop", torch::nn::Dropout(dropout))) {
    at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(at::arange(parameter.numel(), at::kFloat).sin().mul(0.5).view_as(parameter));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return out->forward(drop->forward(norm->forward(in->forward(x)).relu()));
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(2, 16))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(16))};
  torch::nn::Dropout drop;
  torch::nn::Linear out{register_module("out", torch::nn::Linear(16, 2))};
};

inline Task NetTask(double dropout = 0) {
  return Classification("net", std::make_shared<Net>(dropout));
}

// By one rank: what tells a resumed run from one from scratch, which ends with the same tensors.
inline void CountTrainedBatches(Task& task, int64_t& count) {
  task.loss = [&count, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
    count += output.requires_grad();  // not in evaluations
    return loss(output, target);
  };
}

// Of all ranks, in training: a run from scratch ends with the same tensors as a resumed one.
inline void CountSteps(TrainerOptions& options, std::atomic<int64_t>& count) {
  count = 0;
  options.on_step = [&count](int64_t, const at::Tensor&) {
    ++count;
    return StepAction::kContinue;
  };
}

inline double RelativeDifference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

inline void RunRanks(int world_size, const std::function<void(const session::Session&)>& body,
                     absl::Duration timeout = absl::Seconds(60),
                     absl::Duration stall = absl::Seconds(30)) {
  const char* backend = std::getenv("DDP_TEST_BACKEND");
  session::SessionOptions options;
  options.group.stall = stall;
  backends::RunRankThreads(
      world_size, backend ? backend : "gloo",
      [&](const launchers::Rank& rank, const backends::Group& group) {
        body(session::Session(rank, group, c10::Device(c10::kCPU), options));
      },
      timeout, stall);
}

// The values with this tag in metrics.jsonl, by step.
inline std::map<int64_t, double> Logged(const std::string& log_dir, const std::string& tag) {
  std::map<int64_t, double> values;
  std::ifstream lines(log_dir + "/metrics.jsonl");
  const std::string step = "{\"step\":", key = "\"" + tag + "\":";
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find(key);
    if (at == std::string::npos) continue;
    values[std::stoll(line.substr(step.size()))] = std::stod(line.substr(at + key.size()));
  }
  return values;
}

// Gradient descent by a class of which no OptimizerKind knows the state.
struct PlainOptions : torch::optim::OptimizerCloneableOptions<PlainOptions> {
  double get_lr() const override { return lr; }
  void set_lr(const double rate) override { lr = rate; }
  double lr = 0.1;
};

class Plain : public torch::optim::Optimizer {
 public:
  Plain(std::vector<torch::optim::OptimizerParamGroup> groups, const PlainOptions& defaults)
      : Optimizer(std::move(groups), std::make_unique<PlainOptions>(defaults)) {}

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (at::Tensor& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        if (gradient.defined()) parameter.sub_(gradient * group.options().get_lr());
      }
    }
    return {};
  }
};

inline absl::StatusOr<optim::OptimizerFactory> MakePlain(const OptimizerOptions& options) {
  PlainOptions plain;
  plain.lr = options.lr;
  return optim::FactoryOf<Plain>(plain);
}

inline TrainerOptions Quiet() {
  TrainerOptions options;
  options.log.progress = false;
  options.batch_size = 16;
  options.eval_batch_size = 30;
  options.epochs = 2;
  options.optimizer.lr = 0.5;
  return options;
}

}  // namespace ddp::trainer
