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
#include "ddp/trainer/callback.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/run_end.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

struct Report {
  // The last; test.examples is 0 if the run was stopped before it, or has no test examples.
  Evaluation test;
  int64_t epochs = 0;  // complete epochs, including those before a resume
  int64_t steps = 0;   // optimizer steps, likewise
  // What the checkpoint that was resumed from has, and no component has taken: keys of its top
  // level, and "per_rank/NAME". Also said in the log.
  std::vector<std::string> unclaimed = {};
  RunEnd end = {};
  // Paths of the newest checkpoint, and of the best by keep_best, which may be older runs' of the
  // same folder; empty: there is none.
  std::string last_checkpoint = "";
  std::string best_checkpoint = "";
  std::string best_by = "";    // the metric of the latter: "val/accuracy"
  Evaluation validation = {};  // as `test`, of the validation data; 0 examples without these
  std::string dry_run = "";    // what a dry run has done; else empty
  // Early stopping and plateau by a metric of the test data: "early_stopping.metric test/loss".
  std::vector<std::string> by_test_data = {};
};

// Collective. Trains task.module in place on `train` and evaluates on `test` after each epoch; or,
// if there are validation data, on these, as TrainerOptions::validate says, and on `test` at the
// run's end, unless it is empty. Evaluations do not change what is trained. All
// ranks end with the same parameters. Two runs with the same seed and world size give bit-identical
// parameters, and so does a run that was stopped after any step and resumed, with the exceptions in
// docs/checkpoint.md, "Resuming". Examples may depend on the random numbers that a data set's Get
// receives. A data set that draws from torch's global generator is refused, by its type: rank 0
// reads two examples before the training.
//
// Modules in task.module that are in evaluation mode when the first step begins, after
// Callback::OnStart, stay in it (a frozen BatchNorm); if all are, all are put into training mode.
//
// A run that ends within an epoch, by max_steps, stop_at_step or an early stop, saves
// "epoch_N_step_S": N epochs are complete, S optimizer steps were taken. By max_steps it evaluates
// first, so that the checkpoint has the values; otherwise afterwards. After a signal, or when
// max_time has passed, it saves and ends without an evaluation; one that has begun is given up, and
// the run that goes on makes it. A stopped run resumes at the next example of the epoch;
// with another world size, the remaining examples are distributed over the new ranks, and what is
// left of the schedule over their steps.
//
// The gradient of a step is that of the mean loss: the sum of its losses' sums over batches and
// ranks, divided by the sum of their counts (task.h), also where ranks or batches differ in size. A
// step in which all count 0 changes neither parameters nor the optimizer's state, and a warning
// says so. The loss in logs is this mean; metrics of the task's own are recorded beside it.
//
// If a rank fails in its data, model, logs, on_step or callbacks, all ranks return its error, "rank
// 1: …", and rank 0 has printed it. The session's process group is then unusable. Further errors:
// those of Validate, checkpoint::Manager, components and DataParallel::Create; AlreadyExists if the
// checkpoint folder has checkpoints that the run would overwrite.
absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::AnyDataset& train, const data::AnyDataset& test,
                             const TrainerOptions& options);
// Trains with validation data. Without them, TrainerOptions::validation_size holds some of `train`
// out.
absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::AnyDataset& train, const data::AnyDataset& validation,
                             const data::AnyDataset& test, const TrainerOptions& options);

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run, with the task's
// metrics by name. Before it, if there are such: the table of the test data's metrics (of the
// validation data's, if the run ended before a test); the best and the last checkpoint, and what
// else was chosen by test data; after an early stop, "stopped by signal TERM after step 12: saved
// runs/a/epoch_0_step_12.pt"; the values of the validation data.
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
