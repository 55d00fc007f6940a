// The optimizer of a training step, by a run's options: replicated or sharded, with a scaler and a
// communication hook; and what of it must be the same on all ranks. Private to this folder.
//
//   DDP_ASSIGN_OR_RETURN(StepOptimizer made, MakeStepOptimizer(session, options, …));
//   made.optimizer->step();
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/option_list.h"
#include "checkpoint/stateful.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_tensors.h"
#include "ddp/model_wrapper.h"
#include "ddp/session/session.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/schedule.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

struct StepOptimizer {
  std::unique_ptr<DistributedOptimizer> optimizer;
  checkpoint::Stateful* hook = nullptr;  // the wrapper's communication hook, if it has state
  std::vector<std::string> groups = {};  // descriptions of the parameter groups, if there are some
};

// Call it on all ranks, after `parallel` has given them the same `parameters`, some of those of its
// module. `optimizer` and `maker`: see GroupParameters. `options` say all else: precision, zero,
// comm_hook. `all_ranks_write` is that of the format in which its state is saved. Registers the
// communication hook with `parallel`. Collective with zero.stage > 0. Errors are OptionErrors, and
// those of ZeroRedundancyOptimizer::Create.
absl::StatusOr<StepOptimizer> MakeStepOptimizer(
    const session::Session& session, const TrainerOptions& options,
    const OptimizerOptions& optimizer, const OptimizerMaker& maker, const NamedTensors& parameters,
    const std::shared_ptr<ModelWrapper>& parallel, bool all_ranks_write);

// Whether its state is a component of a run with these options: of one whose kind is not known
// (optim/kind.h) only where checkpoints would have it, so that there is an error.
bool HasSavedState(const DistributedOptimizer& optimizer, const TrainerOptions& options);

// Adds to `list` what RequireSameOptions compares of an optimizer and its schedule, before the
// first step: they may be made by functions of the program, of which its options do not tell. The
// values are those that the optimizer has, by Python's names, and some of the schedule's factors.
// Paths begin with `name`, unless that is empty: "NAME.optimizer.lr". Not collective. Throws what a
// schedule of the program throws.
void ListStepOptions(const std::string& name, const torch::optim::Optimizer& optimizer,
                     const Schedule& schedule, OptionList& list);

// Backward from `loss`, which is that of `optimizer`. The gradients of `others`, whose models it
// may read, stay what they are. `options` are those by which all of them were made. Throws as
// torch's.
void BackwardOf(DistributedOptimizer& optimizer, const at::Tensor& loss,
                const std::vector<DistributedOptimizer*>& others, const TrainerOptions& options);

}  // namespace ddp::trainer
