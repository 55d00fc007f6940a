// Optimizers by name, with fused steps.
//
//   DDP_ASSIGN_OR_RETURN(auto optimizer, MakeOptimizer({.name = "adamw", .lr = 1e-3}, parameters));
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

struct OptimizerOptions {
  std::string name = "sgd";  // sgd, adam, adamw
  double lr = 0.1;           // before the schedule
  double momentum = 0.9;     // sgd alone
  double weight_decay = 0.0;
};

std::vector<std::string> OptimizerNames();

// NotFound, listing what exists, for an unknown name; InvalidArgument for a negative or non-finite
// number.
absl::Status Validate(const OptimizerOptions& options);

// One parameter group. Errors as Validate.
absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const OptimizerOptions& options, const std::vector<at::Tensor>& parameters);

}  // namespace ddp::trainer
