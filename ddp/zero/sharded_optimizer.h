// A ZeroRedundancyOptimizer as the optimizer of a training step.
//
//   DDP_ASSIGN_OR_RETURN(auto zero, ZeroRedundancyOptimizer::Create(parameters, group, make));
//   std::unique_ptr<DistributedOptimizer> optimizer =
//       zero::MakeSharded(std::move(zero), GradScaler::Disabled());
#pragma once

#include <memory>

#include "base/coordinator.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/zero/zero_redundancy_optimizer.h"

namespace ddp::zero {

// Its functions are those of `zero`; in stage 2 it reduces the gradients itself. `ranks`, which
// outlives it: state_dict gives the parts that each rank holds (AddShardedState), for checkpoints;
// `places` as there. Null: it gathers the state onto rank 0.
std::unique_ptr<DistributedOptimizer> MakeSharded(std::unique_ptr<ZeroRedundancyOptimizer> zero,
                                                  std::unique_ptr<GradScaler> scaler,
                                                  const Coordinator* ranks = nullptr,
                                                  bool places = false);

}  // namespace ddp::zero
