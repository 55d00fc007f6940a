// A function that creates an optimizer from parameter groups, for code that chooses the tensors
// later.
//
//   const OptimizerFactory make = FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
//   std::unique_ptr<torch::optim::Optimizer> optimizer = make({OptimizerParamGroup(parameters)});
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "torch/optim/optimizer.h"

namespace ddp::optim {

// Groups that come with options keep these; the others get the factory's.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup> groups)>;

template <typename Optimizer, typename Options>
OptimizerFactory FactoryOf(Options options) {
  return [options](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

}  // namespace ddp::optim
