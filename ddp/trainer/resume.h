// How a run begins from a checkpoint: it goes on with one, or takes the weights of one. Private to
// this folder.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/name.h"
#include "ddp/trainer/run.h"

namespace ddp::trainer {

// Collective; nothing without CheckpointOptions::resume. All ranks read one checkpoint: rank 0
// decides which. If a rank fails, all ranks return its error.
absl::Status Resume(Run& run);

// Collective, within a run: loads the newest checkpoint that is not newer than `newest`; newer ones
// are set aside (Folder::Abandon). No save is under way, and there are no gradients. Its path;
// empty if there is none, and nothing is loaded.
absl::StatusOr<std::string> RollBack(Run& run, const checkpoint::CheckpointName& newest);

// Collective; nothing without CheckpointOptions::init_from, or where Resume will find a checkpoint
// of this run. Rank 0 reads, and all ranks get its weights. After the model is wrapped, which has
// made sure that it is the same on all ranks, and before the optimizer is made, which may copy
// parameters. If a rank fails, all ranks return its error.
absl::Status InitFromCheckpoint(Run& run);

}  // namespace ddp::trainer
