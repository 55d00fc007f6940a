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
#include "checkpoint/manager.h"
#include "ddp/data/dataset.h"
#include "ddp/options.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/session.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

enum class StepAction { kContinue, kStop };

struct TrainerOptions {
  int64_t epochs = 1;
  int64_t max_steps = 0;    // maximum optimizer steps of the whole run; 0: no limit
  int64_t batch_size = 64;  // examples per rank and forward
  int64_t accumulate = 1;   // forwards per optimizer step
  double clip_norm = 0;     // largest norm of the gradients; 0: no clipping
  int64_t seed = 0;         // of the sampler, and with the rank added, of torch's generator

  OptimizerOptions optimizer = {};
  std::string schedule = "constant";  // constant, step, cosine
  int64_t warmup_steps = 0;
  double step_epochs = 1;  // schedule step: epochs between decays
  double gamma = 0.1;      // schedule step: factor of each decay

  // The trainer resets gradients itself, so the bucket views that save a copy are safe here.
  DataParallelOptions data_parallel = {.gradient_as_bucket_view = true};

  int num_workers = 1;            // loader threads per rank
  int64_t eval_batch_size = 250;  // per rank
  int64_t log_every = 10;         // optimizer steps between two records of metrics
  std::string log_dir = "";       // TensorBoard event files and metrics.jsonl; empty: none
  bool progress = true;           // on standard error, by rank 0

  std::string checkpoint_dir = "";  // empty: no checkpoints
  std::string checkpoint_format = "pt";
  int64_t checkpoint_every = 1;  // epochs; the last one is always saved; 0: never save
  int keep_checkpoints = 0;      // newest to keep; 0: all
  checkpoint::SaveOptions save = {};
  std::string resume = "";  // empty: start anew; "auto": newest in checkpoint_dir; else a path
  bool eval_only = false;   // evaluate what `resume` names, and train nothing

  // Written as text to the logs: name, value.
  std::vector<std::pair<std::string, std::string>> hyper_parameters = {};

  // Called after each optimizer step, on the ranks that have it: for measurements, or to stop. If
  // one rank returns kStop, all ranks stop after this step or the next, the same on all of them; if
  // all return it in one step, after that step. What the run saves then is where it goes on.
  std::function<StepAction(int64_t step, const at::Tensor& loss)> on_step = nullptr;
};

// InvalidArgument or NotFound, naming option and value, for what can be told without a rank, a
// dataset or a disk. Train checks it too; programs call it before they start ranks.
absl::Status Validate(const TrainerOptions& options);

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
absl::StatusOr<Report> Train(const Session& session, const Task& task, const data::Dataset& train,
                             const data::Dataset& test, const TrainerOptions& options);

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run.
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
