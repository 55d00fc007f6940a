#include "ddp/trainer/optimizers.h"

#include <utility>

#include "base/status.h"
#include "optim/fused.h"

namespace ddp::trainer {

absl::StatusOr<optim::OptimizerFactory> OptimizerOf(const OptimizerOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (options.name == "adam") {
    return optim::FactoryOf<optim::FusedAdam>(
        torch::optim::AdamOptions(options.lr).weight_decay(options.weight_decay));
  }
  if (options.name == "adamw") {
    return optim::FactoryOf<optim::FusedAdamW>(
        torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay));
  }
  return optim::FactoryOf<optim::FusedSGD>(torch::optim::SGDOptions(options.lr)
                                               .momentum(options.momentum)
                                               .weight_decay(options.weight_decay));
}

absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const OptimizerOptions& options, const std::vector<at::Tensor>& parameters) {
  DDP_ASSIGN_OR_RETURN(const optim::OptimizerFactory make, OptimizerOf(options));
  return make({torch::optim::OptimizerParamGroup(parameters)});
}

}  // namespace ddp::trainer
