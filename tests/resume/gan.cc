// A GAN, for stops_test: two models with an optimizer each, a callback with state, and an example
// that is NaN, so that a run rolls back once per epoch.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/binary_cross_entropy_with_logits.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/options.h"
#include "base/status.h"
#include "checkpoint/stateful.h"
#include "ddp/config/program.h"
#include "ddp/data/dataset.h"
#include "ddp/data/sampler.h"
#include "ddp/session/session.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/trainer.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace ddp {
namespace {

constexpr int64_t kExamples = 512;
constexpr int64_t kTestExamples = 4096;  // an evaluation is as long as some steps
// Of the NaN in the order of the first epoch: in step 7 of two ranks with batches of 16, on rank 0,
// whose buffers count.
constexpr int64_t kBadPosition = 200;

struct GanOptions {
  trainer::TrainerOptions trainer = {.optimizer = {.name = "adam", .lr = 1e-3},
                                     .schedule = {.name = "cosine"}};
  session::SessionOptions session = {.launcher = {.default_nproc_per_node = 2}};
  int64_t ask_at_step = 0;
};

constexpr auto OptionsOf(const GanOptions&) {
  return Options(Inline(&GanOptions::trainer), Inline(&GanOptions::session),
                 Option("ask_at_step", &GanOptions::ask_at_step,
                        "step after which the callback of rank 1 asks for a stop; 0: none")
                     .AtLeast(0));
}

struct Gan : torch::nn::Module {
  at::Tensor Make(int64_t n) { return generator->forward(at::randn({n, 4})); }
  at::Tensor Judge(const at::Tensor& points, double truth) {
    const at::Tensor logits = discriminator->forward(points);
    return at::binary_cross_entropy_with_logits(logits, at::full_like(logits, truth));
  }

  torch::nn::Sequential generator{register_module(
      "generator", torch::nn::Sequential(torch::nn::Linear(4, 16), torch::nn::ReLU(),
                                         torch::nn::Linear(16, 2)))};
  // The NaN is in its running mean before the loss is known.
  torch::nn::Sequential discriminator{register_module(
      "discriminator", torch::nn::Sequential(torch::nn::Linear(2, 16), torch::nn::BatchNorm1d(16),
                                             torch::nn::ReLU(), torch::nn::Linear(16, 1)))};
};

trainer::Task GanTask() {
  using trainer::Mean;
  using trainer::StepContext;
  using trainer::StepOf;
  using trainer::StepOutput;
  const auto gan = std::make_shared<Gan>();
  const auto judge = [gan](at::Tensor& batch, const StepContext&) {
    const int64_t n = batch.size(0);
    const at::Tensor made = gan->Make(n).detach();
    return StepOutput{.loss = Mean(gan->Judge(batch, 1) + gan->Judge(made, 0), n)};
  };
  const auto fool = [gan](at::Tensor& batch, const StepContext&) {
    const int64_t n = batch.size(0);
    return StepOutput{.loss = Mean(gan->Judge(gan->Make(n), 1), n)};
  };
  trainer::Task task;
  task.name = "gan";
  task.module = gan;
  task.eval_step = StepOf<at::Tensor>(judge);
  task.phases = {{.name = "discriminator",
                  .parameters = "discriminator.*",
                  .train_step = StepOf<at::Tensor>(judge)},
                 {.name = "generator",
                  .parameters = "generator.*",
                  .train_step = StepOf<at::Tensor>(fool),
                  .optimizer = trainer::OptimizerOptions{.name = "sgd", .lr = 0.01},
                  .schedule = trainer::ScheduleOptions{.name = "linear"}}};
  return task;
}

// A batch is one tensor [n, 2].
class Circle final : public data::DatasetOf<at::Tensor> {
 public:
  // `bad`: the example that is NaN; none if it is negative.
  explicit Circle(int64_t n, int64_t bad = -1) : angles_(at::arange(n, at::kFloat) * 2.4) {
    if (bad >= 0) angles_[bad] = NAN;
  }
  int64_t size() const override { return angles_.size(0); }
  at::Tensor Get(absl::Span<const int64_t> indices) const override {
    const c10::IntArrayRef list(indices.data(), indices.size());
    const at::Tensor chosen = angles_.index_select(0, at::tensor(list, at::kLong));
    return at::stack({chosen.cos(), chosen.sin()}, 1);
  }

 private:
  const at::Tensor angles_;
};

// Its state depends on each step and each evaluation, and on their order.
class Witness final : public trainer::Callback, public checkpoint::Stateful {
 public:
  Witness(int rank, int64_t ask_at_step) : rank_(rank), ask_at_step_(ask_at_step) {}

  std::string name() const override { return "witness"; }
  checkpoint::Stateful* stateful() override { return this; }

  absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor& loss) override {
    own_ = own_ / 2 + loss.item<double>();
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const at::Tensor& each : run.module().parameters()) sum += each.detach().sum();
    weights_.div_(2).add_(sum);
    if (rank_ == 1 && run.position().step == ask_at_step_) run.RequestStop("asked");
    return absl::OkStatus();
  }

  absl::Status OnEvaluationEnd(trainer::CallbackContext&,
                               const std::map<std::string, double>& metrics) override {
    // Of one that was given up, there are none.
    const auto loss = metrics.find("test/loss");
    if (loss != metrics.end()) evaluated_ = evaluated_ / 2 + loss->second;
    return absl::OkStatus();
  }

  absl::StatusOr<checkpoint::State> state_dict() override {
    checkpoint::State state;
    state.root.insert("weights", weights_);
    state.root.insert("evaluated", evaluated_);
    state.per_rank.emplace(rank_, checkpoint::NewTree()).first->second.insert("own", own_);
    return state;
  }

  absl::Status CheckStateDict(const checkpoint::State& state) const override {
    if (!state.root.contains("evaluated") || state.per_rank.count(rank_) == 0) {
      return absl::InvalidArgumentError("has no evaluation, or nothing of this rank");
    }
    return checkpoint::CheckTensor(state.root, "weights", weights_);
  }

  absl::Status load_state_dict(const checkpoint::State& state, checkpoint::LoadNotes&) override {
    weights_.copy_(state.root.at("weights").toTensor());
    evaluated_ = state.root.at("evaluated").toDouble();
    own_ = state.per_rank.at(rank_).at("own").toDouble();
    return absl::OkStatus();
  }

 private:
  const int rank_;
  const int64_t ask_at_step_;
  at::Tensor weights_ = at::zeros({}, at::kDouble);
  double evaluated_ = 0;
  double own_ = 0;  // this rank's losses
};

absl::Status Train(const session::Session& session, GanOptions options) {
  DDP_ASSIGN_OR_RETURN(const data::DistributedSampler order,
                       data::DistributedSampler::Create(kExamples, {.seed = options.trainer.seed}));
  const Circle train(kExamples, /*bad=*/order.ShareFrom(0).Index(kBadPosition));
  torch::manual_seed(1);
  options.trainer.callbacks = {std::make_shared<Witness>(session.rank(), options.ask_at_step)};
  DDP_ASSIGN_OR_RETURN(
      const trainer::Report report,
      trainer::Train(session, GanTask(), train, Circle(kTestExamples), options.trainer));
  if (session.is_main()) {
    std::puts(trainer::Summary(report, 0).c_str());
    std::fflush(stdout);
  }
  return report.end.status();
}

int Main(int argc, char** argv) {
  GanOptions options;
  config::Program program(ListOptions(options),
                          {.about = "For tests.",
                           .launch = &options.session.launcher,
                           .validate = [&] { return trainer::Validate(options.trainer); },
                           .job_options = {{"log.dir", "{folder}"}}});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  options.session.program_options = &program.options();
  return session::Run(
      options.session, program.argc(), program.argv(),
      [&](const session::Session& session) { return Train(session, options); }, program.explain());
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) { return ddp::Main(argc, argv); }
