// Two models with an optimizer each: a generator learns the points of a circle from a
// discriminator.
//
//   bazel run //tools/examples:gan
#include <memory>
#include <utility>

#include "ddp/data/dataset.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "torch/torch.h"

using ddp::trainer::Mean;
using ddp::trainer::OptimizerOptions;
using ddp::trainer::StepContext;
using ddp::trainer::StepOutput;

struct Gan : torch::nn::Module {
  static torch::nn::Sequential Layers(int64_t inputs, int64_t outputs) {
    return torch::nn::Sequential(torch::nn::Linear(inputs, 64), torch::nn::ReLU(),
                                 torch::nn::Linear(64, 64), torch::nn::ReLU(),
                                 torch::nn::Linear(64, outputs));
  }
  torch::Tensor Make(int64_t n) { return generator->forward(torch::randn({n, 8})); }
  torch::Tensor Judge(const torch::Tensor& points, double truth) {
    const torch::Tensor logits = discriminator->forward(points);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, truth));
  }
  torch::nn::Sequential generator{register_module("generator", Layers(8, 2))};
  torch::nn::Sequential discriminator{register_module("discriminator", Layers(2, 1))};
};

// A batch is one tensor [n, 2].
struct Circle : ddp::data::DatasetOf<torch::Tensor> {
  explicit Circle(int64_t n) : angles(torch::rand({n}) * 6.2832) {}
  int64_t size() const override { return angles.size(0); }
  torch::Tensor Get(absl::Span<const int64_t> indices) const override {
    const torch::Tensor chosen = angles.index_select(0, torch::tensor(c10::IntArrayRef(indices)));
    return torch::stack({chosen.cos(), chosen.sin()}, 1);
  }
  torch::Tensor angles;
};

int main(int argc, char** argv) {
  return ddp::session::Run(
      {.launcher = {.default_nproc_per_node = 2}}, argc, argv, [](const auto& session) {
        torch::manual_seed(1);
        auto gan = std::make_shared<Gan>();
        auto judge = [gan](torch::Tensor& batch, const StepContext&) {
          const int64_t n = batch.size(0);
          const torch::Tensor made = gan->Make(n).detach();
          // One call for both halves: an optimizer step has one backward.
          return StepOutput{.loss = Mean(gan->Judge(batch, 1) + gan->Judge(made, 0), n)};
        };
        auto fool = [gan](torch::Tensor& batch, const StepContext&) {
          return StepOutput{.loss = Mean(gan->Judge(gan->Make(batch.size(0)), 1), batch.size(0))};
        };
        // How far from the circle the generator's points are.
        auto distance = [gan](torch::Tensor& batch, const StepContext&) {
          const torch::Tensor off = (gan->Make(batch.size(0)).norm(2, 1) - 1).abs().mean();
          return StepOutput{.loss = Mean(off, batch.size(0))};
        };
        ddp::trainer::Task task;
        task.name = "gan";
        task.module = gan;
        task.eval_step = ddp::trainer::StepOf<torch::Tensor>(distance);
        task.phases = {{.name = "discriminator",
                        .parameters = "discriminator.*",
                        .train_step = ddp::trainer::StepOf<torch::Tensor>(judge)},
                       {.name = "generator",
                        .parameters = "generator.*",
                        .train_step = ddp::trainer::StepOf<torch::Tensor>(fool),
                        .optimizer = OptimizerOptions{.name = "adam", .lr = 5e-4}}};
        ddp::trainer::TrainerOptions options;
        options.epochs = 10;
        options.optimizer = {.name = "adam", .lr = 1e-3};
        auto report = ddp::trainer::Train(session, task, Circle(20000), Circle(1000), options);
        if (report.ok() && session.is_main()) puts(ddp::trainer::Summary(*report, 0).c_str());
        return report.status();
      });
}
