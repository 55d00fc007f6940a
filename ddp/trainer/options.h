// Options of a training run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/options.h"
#include "checkpoint/manager.h"
#include "ddp/options.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/schedule.h"
#include "ddp/zero/options.h"

namespace ddp::trainer {

// No count is larger; products of two of them do not overflow.
inline constexpr double kMostOption = 1e9;

struct LogOptions {
  std::string dir = "";  // TensorBoard event files and metrics.jsonl; empty: none
  int64_t every = 10;    // optimizer steps between two records of metrics
  bool progress = true;  // on standard error, by rank 0
};

constexpr auto OptionsOf(const LogOptions&) {
  return Options(
      Option("dir", &LogOptions::dir,
             "folder of TensorBoard event files and metrics.jsonl; empty: none"),
      Option("every", &LogOptions::every, "optimizer steps between two records of metrics")
          .AtLeast(1)
          .AtMost(kMostOption),
      Option("progress", &LogOptions::progress, "show progress on standard error"));
}

struct CheckpointOptions {
  checkpoint::ManagerOptions manager = {};  // its directory empty: no checkpoints
  checkpoint::SaveOptions save = {};
  int64_t every = 1;  // epochs; the last one is always saved; 0: never save
  // Empty: start anew; "auto": the newest of the directory, if any; else a checkpoint's path.
  std::string resume = "";
};

constexpr auto OptionsOf(const CheckpointOptions&) {
  return Options(
      Inline(&CheckpointOptions::manager), Inline(&CheckpointOptions::save),
      Option("every", &CheckpointOptions::every,
             "epochs between checkpoints; where a run ends is saved, too; 0: none")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("resume", &CheckpointOptions::resume,
             "auto: the newest of the checkpoints' folder, if any; or a checkpoint's path"));
}

enum class StepAction { kContinue, kStop };

struct TrainerOptions {
  int64_t epochs = 1;
  int64_t max_steps = 0;          // maximum optimizer steps of the whole run; 0: no limit
  int64_t batch_size = 64;        // examples per rank and forward
  int64_t eval_batch_size = 250;  // per rank
  int64_t accumulate = 1;         // forwards per optimizer step
  double clip_norm = 0;           // maximum norm of the gradients; 0: no clipping
  int64_t seed = 0;               // of the sampler, and with the rank added, of torch's generator
  int num_workers = 1;            // loader threads per rank
  bool eval_only = false;         // evaluate what checkpoint.resume names, and train nothing

  OptimizerOptions optimizer = {};
  ScheduleOptions schedule = {};
  // The trainer resets gradients itself, so the bucket views that save a copy are safe here.
  DataParallelOptions data_parallel = {.gradient_as_bucket_view = true};
  zero::ZeroOptions zero = {};
  CheckpointOptions checkpoint = {};
  LogOptions log = {};

  // From the program, not from its user.
  // Written as text to the logs: name, value. A program's own table (OptionList::Table).
  std::vector<std::pair<std::string, std::string>> hyper_parameters = {};
  // Called after each optimizer step, on the ranks that have it: for measurements, or to stop. If
  // one rank returns kStop, all ranks stop after this step or the next, the same on all of them; if
  // all return it in one step, after that step. What the run saves then is where it goes on.
  std::function<StepAction(int64_t step, const at::Tensor& loss)> on_step = nullptr;
};

constexpr auto OptionsOf(const TrainerOptions&) {
  return Options(
      Option("epochs", &TrainerOptions::epochs, "passes over the training set")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("max_steps", &TrainerOptions::max_steps,
             "maximum optimizer steps of the whole run; 0: no limit")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("batch_size", &TrainerOptions::batch_size, "examples per rank and forward")
          .AtLeast(1)
          .AtMost(kMostOption),
      Option("eval_batch_size", &TrainerOptions::eval_batch_size,
             "examples per rank and forward of the evaluation")
          .AtLeast(1)
          .AtMost(kMostOption),
      Option("accumulate", &TrainerOptions::accumulate, "forwards per optimizer step")
          .AtLeast(1)
          .AtMost(kMostOption),
      Option("clip_norm", &TrainerOptions::clip_norm,
             "maximum norm of the gradients; 0: no clipping")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("seed", &TrainerOptions::seed, "of initialisation and of the order of examples"),
      Option("num_workers", &TrainerOptions::num_workers,
             "loader threads per rank; 0: load in the training thread")
          .AtLeast(0)
          .AtMost(1024),
      Option("eval_only", &TrainerOptions::eval_only,
             "evaluate the checkpoint that resume names, and train nothing"),
      Nested("optimizer", &TrainerOptions::optimizer, "the optimizer"),
      Nested("schedule", &TrainerOptions::schedule, "learning rate over time"),
      Nested("data_parallel", &TrainerOptions::data_parallel, "DistributedDataParallel"),
      Nested("zero", &TrainerOptions::zero, "sharded optimizer (ZeRO)"),
      Nested("checkpoint", &TrainerOptions::checkpoint, "checkpoints"),
      Nested("log", &TrainerOptions::log, "logs"));
}

// For what can be told without a rank, a dataset or a disk: OptionError, InvalidArgument or
// NotFound, with option and value. Train checks it too; programs call it before they start ranks.
absl::Status Validate(const TrainerOptions& options);

}  // namespace ddp::trainer
