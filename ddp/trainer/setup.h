// Sets up a run: all that comes before a checkpoint is loaded. Private to this folder.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "ddp/trainer/run.h"

namespace ddp::trainer {

// Collective; once. If a rank fails, all ranks return its error.
absl::Status SetUp(Run& run);

// Collective; for a dry run, after Resume. Lets the run save into a new folder where those of
// `given` have their checkpoints, and sets `folder` to its path, also after an error; empty: the
// run does not save. An error, the same on all ranks, if one of the folders of `given` cannot be
// written to.
absl::Status UseTemporaryFolder(Run& run, const TrainerOptions& given, std::string& folder);

// AlreadyExists on the main rank if a run from scratch, or from the checkpoint `resumed` that is
// not the newest in its folder, would overwrite checkpoints of another run, or later ones of this
// run. Not collective.
absl::Status RefuseToOverwrite(const Run& run, const std::string& resumed);

}  // namespace ddp::trainer
