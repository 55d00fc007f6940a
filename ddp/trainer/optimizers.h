// Optimizers by name, with fused steps.
//
//   DDP_ASSIGN_OR_RETURN(auto optimizer, MakeOptimizer({.name = "adamw", .lr = 1e-3}, parameters));
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "optim/kind.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

struct OptimizerOptions {
  std::string name = "sgd";  // sgd, adam, adamw
  double lr = 0.1;           // before the schedule
  double momentum = 0.9;     // sgd only
  double weight_decay = 0.0;
};

constexpr auto OptionsOf(const OptimizerOptions&) {
  return Options(
      Option("name", &OptimizerOptions::name, "optimizer").OneOf("adam", "adamw", "sgd"),
      Option("lr", &OptimizerOptions::lr, "initial learning rate, which the schedule scales")
          .AtLeast(0),
      Option("momentum", &OptimizerOptions::momentum, "momentum of sgd").AtLeast(0),
      Option("weight_decay", &OptimizerOptions::weight_decay, "weight decay of the optimizer")
          .AtLeast(0));
}

// Makes this optimizer of any parameter groups, whole parameters or pieces of them. OptionError for
// options out of range.
absl::StatusOr<optim::OptimizerFactory> OptimizerOf(const OptimizerOptions& options);

// An optimizer with one parameter group. OptionError for options out of range. Thread-safe.
absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const OptimizerOptions& options, const std::vector<at::Tensor>& parameters);

}  // namespace ddp::trainer
