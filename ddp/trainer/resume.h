// Loads a checkpoint into a run that has been set up. Private to this folder.
#pragma once

#include "absl/status/status.h"
#include "ddp/trainer/run.h"

namespace ddp::trainer {

// Collective; nothing without TrainerOptions::checkpoint.resume. All ranks read one checkpoint:
// rank 0 decides which. If a rank fails, all ranks return its error.
absl::Status Resume(Run& run);

}  // namespace ddp::trainer
