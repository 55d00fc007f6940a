// LibTorch's optimizers with fused steps: one kernel call over all parameters instead of several
// per parameter. Options, state and formulas are those of the torch::optim classes they derive
// from, so checkpoints do not see a difference.
//
//   ddp::optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
//   optimizer.step();
#pragma once

#include <vector>

#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/sgd.h"

namespace ddp::optim {

// Each of these is thread-compatible, and not collective: with equal gradients on all ranks, all
// ranks' parameters stay equal. Gradients must be dense and floating point; what is not falls back
// to the base class's step.

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
