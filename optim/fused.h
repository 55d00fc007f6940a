// LibTorch's optimizers with fused steps: one kernel call for all parameters (of one device, dtype
// and step count) instead of several calls per parameter. Options, state, formulas and checkpoints
// are those of the torch::optim base classes.
//
//   ddp::optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
//   optimizer.step();
#pragma once

#include <vector>

#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace ddp::optim {

// Thread-compatible; not collective: with equal gradients, the parameters stay equal on all ranks.
// If any gradient is sparse, not floating point, or has another dtype or strides than its
// parameter, the whole step is the base class's.

class FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace ddp::optim
