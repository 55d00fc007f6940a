// What a run of //tools:train leaves in its log folder besides the trainer's files.
#pragma once

#include <string>

#include "ddp/config/program.h"
#include "ddp/trainer/options.h"

namespace ddp::tools {

// Sets what the run says of itself in logs and checkpoints: its hyper-parameters and configuration.
// Adds a callback that writes run.yaml (ddp/config/run_record.h) beside config.yaml, on rank 0,
// unless there is no log folder, or the run leaves that of another one as it is: an evaluation, or
// a dry run. Of a dry run launcher local writes no files with the ranks' output either. `program`
// must outlive the run.
void RecordRun(const config::Program& program, trainer::TrainerOptions& options);

// The options by which a run goes on from a checkpoint. `options` must outlive the result.
config::ResumeOption ResumeOf(const trainer::TrainerOptions& options);

// Whether a job of a sweep has saved a checkpoint in its `folder`: by names, without reading any.
bool HasCheckpoint(const std::string& folder);

}  // namespace ddp::tools
