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
  int64_t epochs = 0;  // complete epochs, including those before a resume
  int64_t steps = 0;   // optimizer steps, likewise
  // What the checkpoint that was resumed from has, and no component has taken: keys of its top
  // level, and "per_rank/NAME". Also said in the log.
  std::vector<std::string> unclaimed = {};
};

// Collective. Trains task.module in place on `train` and evaluates on `test` after each epoch. All
// ranks end with the same parameters. Two runs with the same seed and world size give bit-identical
// parameters, and so does a run that was stopped after any step and resumed, with the exceptions in
// docs/checkpoint.md, "Resuming". This holds for data sets whose examples depend on their index
// alone: threads load batches ahead, so that random numbers which Dataset::Get draws from a shared
// generator are not those of the run before.
//
// Modules in task.module that are in evaluation mode stay in it (a frozen BatchNorm); if
// task.module itself is, all are put into training mode.
//
// A run that ends within an epoch, by max_steps, stop_at_step or on_step, saves "epoch_N_step_S": N
// epochs are complete, S optimizer steps were taken. It resumes at the next example of the epoch;
// with another world size, the remaining examples are distributed over the new ranks, and what is
// left of the schedule over their steps.
//
// The loss in logs is the mean over the examples of the step, of all ranks.
//
// If a rank fails in its data, model, logs or on_step, all ranks return its error, "rank 1: …", and
// rank 0 has printed it. The session's process group is then unusable. Further errors: those of
// Validate, checkpoint::Manager, components and DataParallel::Create; AlreadyExists if the
// checkpoint folder has checkpoints that the run would overwrite.
absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::Dataset& train, const data::Dataset& test,
                             const TrainerOptions& options);

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run.
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
