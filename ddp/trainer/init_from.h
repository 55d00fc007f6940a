// Begins a new run with the weights of a checkpoint. Private to this folder.
#pragma once

#include "absl/status/statusor.h"
#include "checkpoint/manager.h"
#include "ddp/session/session.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/run_log.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// Collective. Gives `module` the weights of CheckpointOptions::init_from, and says so in `log`.
// False: there is no such option; or `own`, if it is not null, has a checkpoint, with which the run
// will go on. Rank 0 reads, and all ranks get its weights. After the model is wrapped, which has
// made sure that it is the same on all ranks, and before the optimizer is made, which may copy
// parameters. If a rank fails, all ranks return its error.
absl::StatusOr<bool> InitFromCheckpoint(const session::Session& session,
                                        const CheckpointOptions& options,
                                        const checkpoint::Manager* own, torch::nn::Module& module,
                                        RunLog& log);

}  // namespace ddp::trainer
