// LibTorch's optimizers with fused steps: one kernel call for all parameters (of one device, dtype
// and step count) instead of several calls per parameter. Options, state, formulas and checkpoints
// are those of the torch::optim base classes.
//
//   ddp::optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
//   optimizer.step();
#pragma once

#include <cstddef>
#include <vector>

#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace ddp::optim {

// Thread-compatible; not collective: with equal gradients, the parameters stay equal on all ranks.
// If any gradient is sparse, not of floating point, or has another dtype or strides than its
// parameter, the whole step is the base class's.
//
// A module that shares a parameter lists it twice in parameters(), unlike in Python: within a group
// it counts once. In two groups it is a c10::Error, of the constructor or, for a group that was
// added later, of step.
//
// Complex parameters are updated as pairs of real numbers, as in Python. The base classes of Adam
// and AdamW square complex gradients, so step throws c10::Error where it would be theirs.

class FusedSGD : public torch::optim::SGD {
 public:
  FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           torch::optim::SGDOptions defaults);
  FusedSGD(std::vector<torch::Tensor> parameters, torch::optim::SGDOptions defaults);
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  size_t distinct_ = 0;  // parameters that have been found distinct
};

class FusedAdam : public torch::optim::Adam {
 public:
  FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
            torch::optim::AdamOptions defaults = {});
  explicit FusedAdam(std::vector<torch::Tensor> parameters,
                     torch::optim::AdamOptions defaults = {});
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  size_t distinct_ = 0;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             torch::optim::AdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<torch::Tensor> parameters,
                      torch::optim::AdamWOptions defaults = {});
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  size_t distinct_ = 0;
};

}  // namespace ddp::optim
