// Resumes a run of //tools:train for two epochs. In the second, rank 1 throws while rank 0 waits
// for it in a collective.
//
//   throwing_rank LOG_DIR CHECKPOINT_DIR
#include <cstdio>
#include <stdexcept>

#include "absl/status/status.h"
#include "base/status.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "tools/datasets/registry.h"
#include "tools/models/registry.h"

namespace {

constexpr int kStepsPerEpoch = 2;  // 256 examples of two ranks at batch 64

absl::Status Train(const ddp::session::Session& session, const char* log_dir,
                   const char* checkpoint_dir) {
  DDP_ASSIGN_OR_RETURN(auto data, ddp::tools::datasets::Load(
                                      {.name = "synthetic", .train_size = 256, .test_size = 64}));
  DDP_ASSIGN_OR_RETURN(auto task, ddp::tools::models::Make({.name = "mlp",
                                                            .input_shape = data.input_shape,
                                                            .num_classes = data.num_classes}));
  int steps = 0;
  task.loss = [loss = task.loss, &steps, &session](const at::Tensor& output,
                                                   const at::Tensor& target) {
    if (output.requires_grad() && session.rank() == 1 && steps++ > kStepsPerEpoch) {
      throw std::runtime_error("the simulator exploded");
    }
    return loss(output, target);
  };
  ddp::trainer::TrainerOptions options;
  options.epochs = 3;
  options.checkpoint.resume = "auto";
  options.log.dir = log_dir;
  options.checkpoint.manager.directory = checkpoint_dir;
  return ddp::trainer::Train(session, task, *data.train, *data.test, options).status();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s LOG_DIR CHECKPOINT_DIR\n", argv[0]);
    return 2;
  }
  return ddp::session::Run(
      {.launcher = {.nproc_per_node = 2}}, argc, argv,
      [argv](const ddp::session::Session& session) { return Train(session, argv[1], argv[2]); });
}
