#include "ddp/data/dataset.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "torch/torch.h"

namespace render {

struct Cameras {
  torch::Tensor direction;                // [n, 3]
  std::vector<std::string> names;         // n
  std::optional<torch::Tensor> exposure;  // [n]; not in the training set
};
constexpr auto FieldsOf(const Cameras&) {
  return ddp::Fields(ddp::Field("direction", &Cameras::direction),
                     ddp::Field("names", &Cameras::names),
                     ddp::Field("exposure", &Cameras::exposure));
}

struct Frames {  // a batch; and what an evaluation gives of each example
  Cameras cameras;
  torch::Tensor light;  // [n]
};
constexpr auto FieldsOf(const Frames&) {
  return ddp::Fields(ddp::Field("cameras", &Frames::cameras), ddp::Field("light", &Frames::light));
}

struct Scene : ddp::data::DatasetOf<Frames> {
  Scene(int64_t n, bool has_exposure) : n(n), has_exposure(has_exposure) {}
  int64_t size() const override { return n; }
  Frames Get(absl::Span<const int64_t> indices) const override {
    const torch::Tensor i = torch::tensor(c10::IntArrayRef(indices)).to(torch::kFloat);
    Frames frames;
    frames.cameras.direction = torch::stack({i.sin(), i.cos(), (3 * i).sin()}, 1);
    for (int64_t index : indices) frames.cameras.names.push_back("camera_" + std::to_string(index));
    if (has_exposure) frames.cameras.exposure = i / n;
    frames.light = frames.cameras.direction.sum(1).abs();
    return frames;
  }
  const int64_t n;
  const bool has_exposure;
};

}  // namespace render

int main(int argc, char** argv) {
  using render::Frames, render::Scene;
  return ddp::session::Run(
      {.launcher = {.default_nproc_per_node = 3}}, argc, argv,
      [](const auto& session) -> absl::Status {
        torch::manual_seed(1);
        torch::nn::Sequential net(torch::nn::Linear(3, 32), torch::nn::ReLU(),
                                  torch::nn::Linear(32, 1));
        auto step = [net](Frames& frames, const auto&) mutable {
          torch::Tensor errors = net->forward(frames.cameras.direction).squeeze(1) - frames.light;
          return ddp::trainer::StepOutput{
              .loss = {errors.square().sum(), errors.numel()},
              .predictions = ddp::data::AnyBatch(Frames{frames.cameras, errors.abs().detach()})};
        };
        auto task = ddp::trainer::TaskOf<Frames>("light", net.ptr(), step);
        ddp::trainer::TrainerOptions options;
        options.epochs = 20;
        options.optimizer = {.name = "adam", .lr = 0.01};
        const Scene train(1000, false), test(101, true);
        DDP_RETURN_IF_ERROR(ddp::trainer::Train(session, task, train, test, options).status());
        Frames all;  // each example once, in the data set's order, on all ranks
        DDP_RETURN_IF_ERROR(
            ddp::trainer::Evaluate(session, task, test, {.batch_size = 16}, &all).status());
        const int64_t worst = all.light.argmax().template item<int64_t>();
        if (session.is_main()) {
          printf("%zu frames; the largest error is that of frame %ld, %s, with exposure %.2f\n",
                 all.cameras.names.size(), worst, all.cameras.names[worst].c_str(),
                 (*all.cameras.exposure)[worst].template item<double>());
        }
        return absl::OkStatus();
      });
}
