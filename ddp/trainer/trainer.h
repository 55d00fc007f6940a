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
#include "ddp/trainer/task.h"

namespace ddp::trainer {

enum class EndReason {
  kEnd,         // all epochs are complete
  kMaxSteps,    // TrainerOptions::max_steps
  kStopAtStep,  // TrainerOptions::stop_at_step
  kMaxTime,     // TrainerOptions::max_time
  kCallback,    // a rank's on_step, or another callback, has asked for it
  kSignal,      // one of TrainerOptions::stop_signals
};

// Why a run has ended; the same on all ranks.
struct RunEnd {
  EndReason reason = EndReason::kEnd;
  int signal = 0;        // its number, of kSignal
  std::string why = "";  // of kCallback, what the callback has said
  // The checkpoint from which a run that stopped early goes on; empty: none was saved.
  std::string saved = "";

  // "end", "max_steps", "stop_at_step", "max_time", "callback", "signal TERM".
  std::string Name() const;
  // Whether the run was to go on, and can be resumed.
  bool early() const { return reason != EndReason::kEnd && reason != EndReason::kMaxSteps; }
  // What the body of session::Run returns after it: OK, or EndedBy(signal), so that the exit code
  // is 128 + the signal.
  absl::Status status() const;
};

struct Report {
  Evaluation test;     // the last; test.examples is 0 if the run was stopped before it
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
// A run that ends within an epoch, by max_steps, stop_at_step or an early stop, saves
// "epoch_N_step_S": N epochs are complete, S optimizer steps were taken. After a signal, or when
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

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run, with the task's
// metrics by name. Before it, after an early stop: "stopped by signal TERM after step 12: saved
// runs/a/epoch_0_step_12.pt".
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
