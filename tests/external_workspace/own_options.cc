// A program with options of its own: configured by files, swept by --multirun, submitted by
// --launcher=slurm. own_options --config=FILE lr=0.1
#include <fstream>

#include "base/status.h"
#include "ddp/config/program.h"
#include "ddp/ddp.h"
#include "ddp/session/session.h"
#include "torch/torch.h"

struct FitOptions {
  double lr = 0.1;
  int64_t steps = 50;
  std::string log_dir = "fit";
  ddp::session::SessionOptions session = {.launcher = {.default_nproc_per_node = 2}};
};
constexpr auto OptionsOf(const FitOptions&) {
  return ddp::Options(ddp::Option("lr", &FitOptions::lr, "learning rate").Above(0),
                      ddp::Option("steps", &FitOptions::steps, "steps of SGD").AtLeast(1),
                      ddp::Option("log_dir", &FitOptions::log_dir, "folder of metrics.jsonl"),
                      ddp::Inline(&FitOptions::session));
}

int main(int argc, char** argv) {
  FitOptions fit;
  ddp::config::Program program(ddp::ListOptions(fit),
                               {.about = "Fits a line.", .launch = &fit.session.launcher});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  fit.session.program_options = &program.options();
  const auto train = [&](const ddp::session::Session& ranks) -> absl::Status {
    torch::manual_seed(ranks.rank());
    const auto x = torch::randn({64, 1}), y = 3 * x - 1;
    DDP_ASSIGN_OR_RETURN(auto model, ddp::Wrap(torch::nn::Linear(1, 1), ranks.process_group()));
    torch::optim::SGD sgd(model->module()->parameters(), fit.lr);
    double loss = 0;
    for (int64_t step = 0; step < fit.steps; ++step, sgd.step()) {
      model->zero_grad();
      const auto error = torch::mse_loss(model->forward(x), y);
      error.backward(), loss = error.item<double>();
    }
    if (ranks.is_main())
      std::ofstream(fit.log_dir + "/metrics.jsonl") << "{\"loss\":" << loss << "}\n";
    return absl::OkStatus();
  };
  return ddp::session::Run(fit.session, program.argc(), program.argv(), train, program.explain());
}
