// Lets a run go on from a checkpoint. Private to this folder.
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
// empty if there is none, and nothing is loaded or set aside. A checkpoint that lacks a component
// is an error, with kAnomalyExitCode.
absl::StatusOr<std::string> RollBack(Run& run, const checkpoint::CheckpointName& newest);

}  // namespace ddp::trainer
