// Options of a training run.
//
//   TrainerOptions options;
//   options.optimizer = {.name = "adam", .lr = 1e-3};
//   options.checkpoint.manager.directory = "runs/a";
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/options.h"
#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/amp/options.h"
#include "ddp/data/order.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/join.h"
#include "ddp/model_wrapper.h"
#include "ddp/options.h"
#include "ddp/trainer/callbacks/options.h"
#include "ddp/trainer/guard/options.h"
#include "ddp/trainer/logging/sink_registry.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/schedule.h"
#include "ddp/zero/options.h"

namespace ddp::trainer {

class Callback;  // callback.h

// Upper bound of counts, so that products of two of them do not overflow.
inline constexpr double kMostOption = 1e9;

struct LogOptions {
  std::string dir = "";  // of what `sinks` write; empty: none
  // They are names of logging::SinkRegistry, those of programs, too.
  std::vector<std::string> sinks = {"tensorboard", "jsonl"};
  int64_t every = 10;    // optimizer steps between two records of metrics
  bool progress = true;  // on standard error, by rank 0
};

constexpr auto OptionsOf(const LogOptions&) {
  return Options(
      Option("dir", &LogOptions::dir,
             "folder of TensorBoard event files and metrics.jsonl; empty: none")
          .MayDiffer(),  // rank 0 alone writes them
      Option("sinks", &LogOptions::sinks, "what writes metrics into the log folder")
          .OneOfThese(&logging::SinkRegistry::Names)
          .Incidental()
          .MayDiffer(),
      Option("every", &LogOptions::every, "optimizer steps between two records of metrics")
          .AtLeast(1)
          .AtMost(kMostOption)
          .Incidental()
          .MayDiffer(),
      Option("progress", &LogOptions::progress, "show progress on standard error")
          .Incidental()
          .MayDiffer());
}

struct CheckpointOptions {
  checkpoint::ManagerOptions manager = {};  // empty directory: no checkpoints
  checkpoint::SaveOptions save = {};
  // It applies to what the run reads: to resume, to roll back and as init_from. `load.callback` may
  // edit the state before components take it, on each rank that reads; of init_from that is the
  // main rank. What it erases, they begin anew, and that is said; but a rollback needs all. It sees
  // what the rank reads: with ZeRO its parts of the optimizer's tensors (State::sharded); with
  // eval_only the model; of init_from the weights. If it throws on one rank, the run ends on all.
  checkpoint::LoadOptions load = {};
  // The run saves after every so many epochs, optimizer steps of the run, or minutes, by rank 0's
  // clock since the last save; 0: not so. A run that saves also saves its end.
  int64_t every = 1;
  int64_t every_steps = 0;
  double every_minutes = 0;
  // Copy the state and write it while the run goes on; one save at a time. `save.callback` then
  // gets the copy, on a thread of its own.
  bool async = false;
  bool check_staging = false;  // compare each copy with the state before the run goes on
  bool continuous = false;     // async, and save again as soon as the last save is on disk
  // Empty: start from scratch; "auto": the newest in the directory, if any; "best": the best by
  // manager.keep_best; else a checkpoint's path.
  std::string resume = "";
  // Not empty: a new run begins with the weights of this checkpoint, of any linked format, ours or
  // Python's (checkpoint/module_state.h: WeightsIn, InitModule). All else is new: step, optimizer,
  // schedule, random numbers. Beside resume=auto it is not read where the run has a checkpoint of
  // its own. They are taken before the optimizer is made, but after Train was called: a component
  // that copies parameters must do so later (on_step), or in load_state_dict.
  std::string init_from = "";
  // Not empty: the weights are those under this key of init_from, as "ema", whose names are the
  // model's; what it lacks, such as buffers, is taken from the model's weights in the file.
  std::string init_key = "";
  bool init_strict = true;    // checkpoint::InitOptions::strict
  std::string init_map = "";  // "OLD=NEW,…", checkpoint/name_map.h
};

constexpr auto OptionsOf(const CheckpointOptions&) {
  return Options(
      Inline(&CheckpointOptions::manager), Inline(&CheckpointOptions::save),
      Option("every", &CheckpointOptions::every,
             "epochs between checkpoints; the end of the run is saved, too; 0: no checkpoints, "
             "unless other options ask for some")
          .Incidental()
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("every_steps", &CheckpointOptions::every_steps,
             "optimizer steps of the run between checkpoints; 0: none within an epoch")
          .Incidental()
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("every_minutes", &CheckpointOptions::every_minutes,
             "minutes between checkpoints, since the last one; 0: none by time")
          .Incidental()
          .AtLeast(0)
          .AtMost(1e6),
      Option("async", &CheckpointOptions::async,
             "copy the state and write the checkpoint while the run goes on")
          .Incidental(),
      Option("check_staging", &CheckpointOptions::check_staging,
             "with async, compare the copy with the state before the run goes on")
          .Incidental(),
      Option("continuous", &CheckpointOptions::continuous,
             "save again as soon as the last checkpoint is on disk; implies async")
          .Incidental(),
      Option("resume", &CheckpointOptions::resume,
             "checkpoint to resume from: its path; auto: the newest in the checkpoint folder, if "
             "any; best: the best by keep_best")
          .OnAllRanksOrNone(),
      Option("init_from", &CheckpointOptions::init_from,
             "checkpoint, also of Python or safetensors, with whose weights a new run begins")
          .OnAllRanksOrNone(),
      Option("init_key", &CheckpointOptions::init_key,
             "key of other weights in init_from, such as ema, to take in place of the model's"),
      Option("init_strict", &CheckpointOptions::init_strict,
             "init_from must fit the model exactly; false: take what fits"),
      Option("init_map", &CheckpointOptions::init_map,
             "names of init_from to replace: OLD=NEW,…, OLD a regular expression; $1 in NEW is "
             "its first group"));
}

// Whether a run with a folder saves into it.
inline bool AsksForSaves(const CheckpointOptions& options) {
  return options.every > 0 || options.every_steps > 0 || options.every_minutes > 0 ||
         options.continuous;
}

// Whether saves run on a thread of their own.
inline bool SavesAsync(const CheckpointOptions& options) {
  return options.async || options.continuous;
}

// A run that has validation data evaluates them this often; 0: not so. What is due is evaluated
// once, and the end of the run is evaluated in any case.
struct ValidationOptions {
  int64_t every = 1;         // epochs
  int64_t every_steps = 0;   // optimizer steps of the run
  double every_minutes = 0;  // since the last time, by rank 0's clock
};

constexpr auto OptionsOf(const ValidationOptions&) {
  return Options(
      Option("every", &ValidationOptions::every,
             "epochs between evaluations of the validation data")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("every_steps", &ValidationOptions::every_steps,
             "optimizer steps of the run between evaluations of the validation data; 0: none "
             "within an epoch")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("every_minutes", &ValidationOptions::every_minutes,
             "minutes between evaluations of the validation data; 0: none by time")
          .AtLeast(0)
          .AtMost(1e6));
}

enum class StepAction { kContinue, kStop };

struct TrainerOptions {
  // The run, and the schedule of its learning rate, end with what comes first: these epochs, or
  // max_steps optimizer steps of the whole run (0: no limit).
  int64_t epochs = 1;
  int64_t max_steps = 0;
  // Stop after this optimizer step of the run, save, and go on later with the same options: no part
  // of what the run is. 0: do not stop. Where ranks differ, the smallest counts.
  int64_t stop_at_step = 0;
  // Likewise after the step in which this time has passed since Train was called, by the clock of
  // the first rank to find that, but so early that a save as long as the longest so far ends in
  // time. 0: no limit. Where ranks differ, the smallest counts.
  absl::Duration max_time = absl::ZeroDuration();
  // Signals after which the run stops likewise, with Report::end, on whichever rank they come: some
  // of TERM, INT, USR1, USR2. Others keep their effect, and so do these while the run is set up.
  std::vector<std::string> stop_signals = {"TERM", "INT", "USR1", "USR2"};
  int64_t batch_size = 64;  // examples per rank and forward
  bool drop_last = false;   // leave out an epoch's last batch if it is not full
  // The order of each epoch is drawn from (seed, epoch); false: the training set's own.
  bool shuffle = true;
  int64_t eval_batch_size = 250;  // per rank
  int64_t accumulate = 1;         // forwards per optimizer step
  // Gradients are clipped by one of two, by norm or by value (ddp/clip_grad.h). 0: they are not.
  double clip_norm = 0;              // maximum norm of all gradients
  std::string clip_norm_type = "2";  // p of the p-norm, above 0; "inf": the maximum norm
  double clip_value = 0;             // maximum of each element's absolute value
  // Seeds the sampler; seed + rank seeds torch's generators at the run's start.
  int64_t seed = 0;
  int num_workers = 1;      // loader threads per rank
  int prefetch_factor = 2;  // batches that each of them loads ahead
  bool pin_memory = true;   // batches for a GPU are loaded into pinned memory
  // Only evaluate the checkpoint of checkpoint.resume, or the weights of checkpoint.init_from.
  bool eval_only = false;
  // Only try the run out: two steps, evaluations of at most two batches per rank, and a save into a
  // temporary folder where the checkpoints would be, which is removed. Report::dry_run says what
  // was done. Nothing is written elsewhere. on_step is called as in a run.
  bool dry_run = false;
  // Examples of the training data that are held out as validation data: a number, or, below 1, a
  // part. They depend on `seed` alone, and are those of Python's random_split (ddp/data/subset.h).
  double validation_size = 0;
  ValidationOptions validate = {};
  // Metrics of the evaluations, by name, besides those of the task: Task::metric_names.
  std::vector<std::string> metrics = {};
  // torch: batch normalisation over the batches of all ranks (ddp/sync_batch_norm.h). none: each
  // rank over its own.
  std::string sync_bn = "none";
  // bf16, fp16: forward runs under autocast (ddp/amp/autocast.h); fp16 with a gradient scaler.
  // Parameters, gradients and optimizer stay float32.
  std::string precision = "fp32";
  // Optimizer steps between two comparisons of the ranks' parameters, bit by bit
  // (ddp/gather/all_agree.h); 0: never.
  int64_t check_agreement_every = 0;
  // A file for the target and prediction of each test example, replaced after each evaluation. It
  // needs tasks whose StepOutput::predictions are Outputs [n, classes], as those by forward and
  // loss, or Predictions. Empty: none.
  std::string predictions = "";
  std::string model_wrapper = "ddp";  // of those that are registered (ddp/model_wrapper.h)

  // All ranks get the same number of examples: some are used twice in an epoch. False: each once;
  // ranks whose examples run out first shadow the others (ddp/join.h).
  bool even_batches = true;
  // Ranks that run out use it. divide_by_initial_world_size changes nothing here: gradients are
  // divided by what the losses count, of which a rank without batches has 0.
  JoinOptions join = {};

  OptimizerOptions optimizer = {};
  ScheduleOptions schedule = {};
  // Bucket views save a copy. Safe here, since the trainer resets gradients with zero_grad().
  DataParallelOptions data_parallel = {.gradient_as_bucket_view = true};
  // How buckets of gradients are reduced. Stage 2 of zero accepts hooks with a wire_dtype.
  hooks::CommHookOptions comm_hook = {};
  zero::ZeroOptions zero = {};
  GradScalerOptions grad_scaler = {};
  CheckpointOptions checkpoint = {};
  LogOptions log = {};
  // Callbacks that are built in (docs/training_callbacks.md).
  EmaOptions ema = {};
  EarlyStoppingOptions early_stopping = {};
  MonitorOptions monitor = {};
  // The response to a loss or gradient that is not finite or far above its mean, or to replicas
  // that differ (docs/training_guard.md).
  GuardOptions guard = {};

  // The following are set by the program, not by its user.
  // Names and values, written to the logs as a table; for example OptionList::Table().
  std::vector<std::pair<std::string, std::string>> hyper_parameters = {};
  // The run's configuration as text: in log.dir as config.yaml, and in each checkpoint as `config`.
  // Empty: in neither. A resumed run that is configured differently writes config_step_N.yaml.
  std::string configuration = "";
  // Called on resuming, with the configuration in the checkpoint: adds to the notes which options
  // count for the result and are others now (LoadNotes::AddConfigured). Null: only what components
  // compare is said.
  std::function<void(const std::string& saved, checkpoint::LoadNotes& notes)>
      compare_configuration = nullptr;
  // The program's own objects with state, such as an average of weights: saved in each checkpoint
  // under their names, and loaded from the one that the run is resumed from, after model, optimizer
  // and schedule. The same names on all ranks, in one order, and none of the trainer's (keys.h). A
  // checkpoint without one of them is resumed from all the same, and that is said.
  std::vector<checkpoint::Component> components = {};
  // The order of the examples, in the place of `shuffle`: one of ddp/data/order.h, or the program's
  // own. It is the same on all ranks, and in a run that goes on within an epoch.
  data::SharedSampler sampler = nullptr;
  // Makes the optimizer in the place of the one that optimizer.name names: any torch::optim one. It
  // gets TrainerOptions::optimizer, once for each parameter group with the group's lr and
  // weight_decay. The same on all ranks.
  OptimizerMaker make_optimizer = nullptr;
  // The schedule, in the place of the one that schedule.name names; warm-up comes before it.
  LrLambda lr_lambda = nullptr;
  // The program's own, called after the built-in ones: code at the events of the run, with state in
  // checkpoints. The same on all ranks, in one order.
  std::vector<std::shared_ptr<Callback>> callbacks = {};
  // The simplest callback: called after each optimizer step, on the ranks that set it, for
  // measurements or to stop early.
  // If a rank returns kStop, all ranks stop after the same step: this one or the next; if all ranks
  // return it in the same step, after this one. The run then saves and can be resumed. `loss` is
  // this rank's own; 0 where it has run out of batches (even_batches=false).
  std::function<StepAction(int64_t step, const at::Tensor& loss)> on_step = nullptr;
};

constexpr auto OptionsOf(const TrainerOptions&) {
  return Options(
      Option("epochs", &TrainerOptions::epochs,
             "passes over the training set; the schedule ends with the run")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("max_steps", &TrainerOptions::max_steps,
             "maximum optimizer steps of the whole run, where its schedule ends, too; "
             "0: no limit")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("stop_at_step", &TrainerOptions::stop_at_step,
             "optimizer step of the run after which to save and stop, to go on later; "
             "0: do not stop")
          .AtLeast(0)
          .AtMost(kMostOption)
          .Incidental()
          .MayDiffer(),
      Option("max_time", &TrainerOptions::max_time,
             "time after which to save and stop, to go on later: 90m, 1h30m, or seconds; 0: no "
             "limit")
          .AtLeast(0)
          .AtMost(1e9)
          .Incidental()
          .MayDiffer(),
      Option("stop_signals", &TrainerOptions::stop_signals,
             "signals after which to save and stop, to go on later: TERM, INT, USR1, USR2")
          .Incidental()
          .MayDiffer(),
      Option("batch_size", &TrainerOptions::batch_size, "examples per rank and forward")
          .AtLeast(1)
          .AtMost(kMostOption),
      Option("drop_last", &TrainerOptions::drop_last,
             "leave out an epoch's last batch if it is not full"),
      Option("shuffle", &TrainerOptions::shuffle,
             "draw the order of each epoch's examples; false: that of the training set"),
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
      Option("clip_norm_type", &TrainerOptions::clip_norm_type,
             "with clip_norm: p of the norm, a number above 0, or inf for the maximum"),
      Option("clip_value", &TrainerOptions::clip_value,
             "maximum absolute value of each element of the gradients; 0: no clipping")
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("seed", &TrainerOptions::seed,
             "seed of initialisation, random numbers and the order of examples"),
      Option("num_workers", &TrainerOptions::num_workers,
             "loader threads per rank; 0: load in the training thread")
          .AtLeast(0)
          .AtMost(1024)
          .Incidental()
          .MayDiffer(),
      Option("prefetch_factor", &TrainerOptions::prefetch_factor,
             "batches that each loader thread loads ahead")
          .AtLeast(1)
          .AtMost(1 << 20)
          .Incidental()
          .MayDiffer(),
      Option("pin_memory", &TrainerOptions::pin_memory,
             "load batches for a GPU into pinned memory, from which copies run beside the program")
          .Incidental()
          .MayDiffer(),
      Option("eval_only", &TrainerOptions::eval_only,
             "evaluate the checkpoint given by resume, or the weights of init_from, and do not "
             "train"),
      Option("dry_run", &TrainerOptions::dry_run,
             "try the run out: two steps, evaluations and a save, of which nothing is kept"),
      Option("validation_size", &TrainerOptions::validation_size,
             "training examples to hold out as validation data: a number, or a part below 1")
          .AtLeast(0)
          .AtMost(kMostOption),
      Nested("validate", &TrainerOptions::validate, "when validation data are evaluated"),
      Option("metrics", &TrainerOptions::metrics,
             "further metrics of evaluations: auc, confusion, f1, perplexity, top5 (or another "
             "number)"),
      Option("sync_bn", &TrainerOptions::sync_bn,
             "batch normalisation over the batches of all ranks")
          .OneOf("none", "torch"),
      Option("precision", &TrainerOptions::precision,
             "precision of forward: autocast to bf16 or fp16; fp16 scales the loss")
          .OneOf("fp32", "bf16", "fp16"),
      Option("check_agreement_every", &TrainerOptions::check_agreement_every,
             "optimizer steps between two checks that all ranks have the same "
             "parameters; 0: never")
          .Incidental()
          .AtLeast(0)
          .AtMost(kMostOption),
      Option("predictions", &TrainerOptions::predictions,
             "file for target and prediction of each test example; empty: none")
          .Incidental()
          .OnAllRanksOrNone(),
      Option("model_wrapper", &TrainerOptions::model_wrapper,
             "wrapper of the model that synchronises gradients and buffers")
          .OneOfThese(&ModelWrapperRegistry::Names),
      Option("even_batches", &TrainerOptions::even_batches,
             "same number of examples on each rank; false: each example once per epoch"),
      Nested("join", &TrainerOptions::join, "ranks that run out of batches first"),
      Nested("optimizer", &TrainerOptions::optimizer, "the optimizer"),
      Nested("schedule", &TrainerOptions::schedule, "learning rate over time"),
      Nested("data_parallel", &TrainerOptions::data_parallel, "DistributedDataParallel"),
      Nested("comm_hook", &TrainerOptions::comm_hook, "communication hook"),
      Nested("zero", &TrainerOptions::zero, "sharded optimizer (ZeRO)"),
      Nested("grad_scaler", &TrainerOptions::grad_scaler,
             "scaling of the loss with precision fp16"),
      Nested("checkpoint", &TrainerOptions::checkpoint, "checkpoints"),
      Nested("log", &TrainerOptions::log, "logs"),
      Nested("ema", &TrainerOptions::ema, "moving average of the weights"),
      Nested("early_stopping", &TrainerOptions::early_stopping, "end without improvement"),
      Nested("monitor", &TrainerOptions::monitor, "records about the run itself"),
      Nested("guard", &TrainerOptions::guard, "anomalies of losses and gradients"));
}

// Checks everything that can be checked without ranks, data and disk. OptionError, with code
// InvalidArgument or NotFound. Train calls it, too; programs call it before they start ranks.
absl::Status Validate(const TrainerOptions& options);

// The same for a loop of one's own with an Accelerator: OptionError also for what only Train does.
absl::Status ValidateForOwnLoop(const TrainerOptions& given);

// The number that TrainerOptions::clip_norm_type is. OptionError.
absl::StatusOr<double> ClipNormType(const TrainerOptions& options);

}  // namespace ddp::trainer
