// own_loop FOLDER EPOCHS RANKS: a training loop of one's own, which goes on where it was stopped.
#include "ddp/trainer/accelerator.h"
#include "torch/torch.h"
using namespace ddp;
struct Wave : data::Dataset {
  explicit Wave(int64_t n) : n(n) {}
  int64_t size() const override { return n; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const torch::Tensor x = torch::tensor(c10::IntArrayRef(indices)).to(torch::kFloat).div(n);
    return {x.unsqueeze(1), (6 * x).sin().unsqueeze(1)};
  }
  const int64_t n;
};
absl::Status Train(const session::Session& session, const std::string& folder, int epochs) {
  const Wave train(1003), test(101);
  trainer::TrainerOptions options{.epochs = epochs, .batch_size = 16, .accumulate = 2};
  options.optimizer = {.name = "adamw", .lr = 0.01};
  options.log.dir = options.checkpoint.manager.directory = folder;
  DDP_ASSIGN_OR_RETURN(auto accelerator, trainer::Accelerator::Create(session, "wave", options));
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Dropout(0.01),
                            torch::nn::BatchNorm1d(32), torch::nn::Linear(32, 1));
  DDP_ASSIGN_OR_RETURN(auto loader, accelerator->PrepareLoader<data::Batch>(train));
  DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net));
  DDP_ASSIGN_OR_RETURN(auto optimizer, accelerator->PrepareOptimizer(model));
  DDP_RETURN_IF_ERROR(accelerator->LoadState());
  while (accelerator->position().epoch < epochs) {
    net->train();
    while (true) {
      DDP_ASSIGN_OR_RETURN(const auto batch, loader->Next());
      if (!batch) break;
      const auto scope = accelerator->Accumulate();
      const torch::Tensor errors = (model->forward(batch->input) - batch->target).square();
      optimizer->backward({errors.sum(), errors.numel()});
      optimizer->clip_grad_norm_(1.0), optimizer->step(), optimizer->zero_grad();
      DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
      if (!more) return accelerator->SaveAndEnd();
    }
    net->eval();
    const torch::NoGradGuard no_grad;
    std::vector<std::pair<std::vector<int64_t>, torch::Tensor>> errors;
    DDP_ASSIGN_OR_RETURN(auto tests, accelerator->EvaluationLoader<data::Batch>(test));
    while (true) {
      DDP_ASSIGN_OR_RETURN(const auto batch, tests->Next());
      if (!batch) break;
      errors.emplace_back(tests->indices(), (net->forward(batch->input) - batch->target).abs());
    }
    DDP_ASSIGN_OR_RETURN(const auto all, accelerator->GatherForMetrics(std::move(errors)));
    DDP_RETURN_IF_ERROR(accelerator->Log(
        {{"train/loss", optimizer->mean_loss()}, {"test/max_error", all.max().item<double>()}}));
    DDP_RETURN_IF_ERROR(accelerator->SaveState());
  }
  return accelerator->End();
}
int main(int argc, char** argv) {
  int epochs = 0, n = 0;
  if (argc != 4 || !absl::SimpleAtoi(argv[2], &epochs) || !absl::SimpleAtoi(argv[3], &n) || n < 1)
    return fputs("usage: own_loop FOLDER EPOCHS RANKS\n", stderr), 2;
  return session::Run({.launcher = {.default_nproc_per_node = n}}, argc, argv,
                      [&](const auto& s) { return Train(s, argv[1], epochs); });
}
