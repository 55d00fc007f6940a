// The training loop: epochs, gradient accumulation, evaluation, logs, checkpoints, resume.
//
//   TrainerOptions options;
//   options.epochs = 5;
//   DDP_ASSIGN_OR_RETURN(Report report, Train(session, task, train, test, options));
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"
#include "ddp/session/session.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

struct Report {
  Evaluation test;
  int64_t epochs = 0;  // complete ones, those before a resume included
  int64_t steps = 0;
};

// Collective. Trains task.module on `train`, evaluating on `test` after each epoch; the module, in
// place, ends with the trained parameters, the same on all ranks. With one seed and world size, two
// runs end with the same bits, and so does a run that was stopped after any step and resumed; over
// gloo and hier, from three ranks on, only up to rounding: their order of addition depends on where
// in a bucket a gradient lies, and a resumed run lays its buckets out anew after its first step.
//
// A run that ends within an epoch, by max_steps or on_step, saves "epoch_N_step_S": N epochs are
// complete, S optimizer steps were taken. It goes on at the very next example of the epoch; with
// another world size, the examples that are left are dealt to the new ranks.
//
// If one rank fails, in its data, its model, its logs or on_step, all ranks return that error,
// "rank 1: …", and rank 0 has printed it. The session's process group is of no use then.
absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::Dataset& train, const data::Dataset& test,
                             const TrainerOptions& options);

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run.
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
