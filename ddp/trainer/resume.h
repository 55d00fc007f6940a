// How a run begins from a checkpoint: it goes on with one, or takes the weights of one. Private to
// this folder.
#pragma once

#include "absl/status/status.h"
#include "checkpoint/format.h"
#include "ddp/session/session.h"
#include "ddp/trainer/run.h"

namespace ddp::trainer {

// Collective; nothing without CheckpointOptions::resume. All ranks read one checkpoint: rank 0
// decides which. If a rank fails, all ranks return its error.
absl::Status Resume(Run& run);

// Collective; nothing without CheckpointOptions::init_from, or where Resume will find a checkpoint
// of this run. Rank 0 reads, and all ranks get its weights. After the model is wrapped, which has
// made sure that it is the same on all ranks, and before the optimizer is made, which may copy
// parameters. If a rank fails, all ranks return its error.
absl::Status InitFromCheckpoint(Run& run);

// What formats share bytes by, over the session's process group; null with a world size of 1.
// `session` must outlive it.
checkpoint::BroadcastBytes BroadcastOver(const session::Session& session);
// Likewise, what rank 0 gets the others' parts of tensors by.
checkpoint::MoveToRank0 MoveOver(const session::Session& session);

}  // namespace ddp::trainer
