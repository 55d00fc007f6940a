// Starts training, or goes on where it stopped, with a step of one's own: start_resume FOLDER
// EPOCHS
#include "absl/strings/numbers.h"
#include "ddp/trainer/trainer.h"
#include "torch/torch.h"
struct Numbers : ddp::data::DatasetOf<torch::Tensor> {
  int64_t size() const override { return 4096; }
  torch::Tensor Get(absl::Span<const int64_t> indices) const override {
    return torch::tensor(c10::IntArrayRef(indices)).to(torch::kFloat).div(4096).unsqueeze(1);
  }
};

int main(int argc, char** argv) {
  return ddp::session::Run({}, argc, argv, [&](const auto& session) -> absl::Status {
    ddp::trainer::TrainerOptions options;
    if (argc != 3 || !absl::SimpleAtoi(argv[2], &options.epochs))
      return absl::InvalidArgumentError("usage: start_resume FOLDER EPOCHS");
    options.log.dir = argv[1];
    options.checkpoint.manager.directory = std::string(argv[1]) + "/checkpoints";
    options.checkpoint.resume = "auto";
    torch::manual_seed(1);
    torch::nn::Linear net(1, 1);
    auto step = [net](torch::Tensor& x, const auto&) mutable {
      const torch::Tensor errors = (net(x) - 3 * x).square();
      return ddp::trainer::StepOutput{.loss = {errors.sum(), errors.numel()}};
    };
    auto task = ddp::trainer::TaskOf<torch::Tensor>("line", net.ptr(), step);
    return ddp::trainer::Train(session, task, Numbers(), Numbers(), options).status();
  });
}
