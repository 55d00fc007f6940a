#include "ddp/trainer/optimizers.h"

#include "base/status.h"
#include "optim/fused.h"

namespace ddp::trainer {

absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const OptimizerOptions& options, const std::vector<at::Tensor>& parameters) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (options.name == "adam") {
    return std::make_unique<optim::FusedAdam>(
        parameters, torch::optim::AdamOptions(options.lr).weight_decay(options.weight_decay));
  }
  if (options.name == "adamw") {
    return std::make_unique<optim::FusedAdamW>(
        parameters, torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay));
  }
  return std::make_unique<optim::FusedSGD>(parameters, torch::optim::SGDOptions(options.lr)
                                                           .momentum(options.momentum)
                                                           .weight_decay(options.weight_decay));
}

}  // namespace ddp::trainer
