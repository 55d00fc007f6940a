#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "torch/torch.h"

struct Net : torch::nn::Module {
  torch::nn::Linear in{register_module("in", torch::nn::Linear(2, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 2))};
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::relu(in(x))); }
};

// Points in a square; class 1 inside a circle.
struct Circle : ddp::data::Dataset {
  explicit Circle(int64_t n) : points(torch::rand({n, 2}) * 2 - 1) {}
  int64_t size() const override { return points.size(0); }
  ddp::data::Batch Get(absl::Span<const int64_t> indices) const override {
    torch::Tensor x = points.index_select(0, torch::tensor(c10::IntArrayRef(indices)));
    return {x, x.pow(2).sum(1).lt(0.6).to(torch::kLong)};
  }
  torch::Tensor points;
};

int main(int argc, char** argv) {
  return ddp::session::Run(
      {.launcher = {.default_nproc_per_node = 2}}, argc, argv, [](const auto& session) {
        torch::manual_seed(1);
        ddp::trainer::TrainerOptions options;
        options.epochs = 20;
        options.optimizer = {.name = "adam", .lr = 0.01};
        auto task = ddp::trainer::Classification("circle", std::make_shared<Net>());
        auto report = ddp::trainer::Train(session, task, Circle(10000), Circle(2000), options);
        if (report.ok() && session.is_main()) puts(ddp::trainer::Summary(*report, 0).c_str());
        return report.status();
      });
}
