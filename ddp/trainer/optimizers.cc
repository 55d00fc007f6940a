#include "ddp/trainer/optimizers.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "ddp/optim/fused.h"

namespace ddp::trainer {

std::vector<std::string> OptimizerNames() { return {"adam", "adamw", "sgd"}; }

absl::Status Validate(const OptimizerOptions& options) {
  const std::vector<std::string> names = OptimizerNames();
  if (std::find(names.begin(), names.end(), options.name) == names.end()) {
    return absl::NotFoundError(absl::StrCat("unknown optimizer '", options.name,
                                            "'; there are: ", absl::StrJoin(names, ", ")));
  }
  for (const auto& [name, value] :
       {std::pair("lr", options.lr), std::pair("momentum", options.momentum),
        std::pair("weight_decay", options.weight_decay)}) {
    if (!std::isfinite(value) || value < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "=", value, " must be a number and not negative"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const OptimizerOptions& options, const std::vector<at::Tensor>& parameters) {
  DDP_RETURN_IF_ERROR(Validate(options));
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
