#include "ddp/trainer/options.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "base/stop_signals.h"
#include "checkpoint/name_map.h"
#include "ddp/metrics/classification.h"
#include "ddp/trainer/callbacks/early_stopping.h"

namespace ddp::trainer {
namespace {

// Of a run without a folder: nothing is saved, whatever says when, how and how many.
absl::Status NothingAsksForSaves(const CheckpointOptions& given) {
  constexpr absl::string_view kOfSaves[] = {"every", "async",  "check_staging", "continuous",
                                            "keep",  "verify", "on_save_error"};
  CheckpointOptions options = given, defaults;
  const OptionList list = ListOptions(options), unset = ListOptions(defaults);
  for (size_t i = 0; i < list.options().size(); ++i) {
    const OptionRef& option = list.options()[i];
    // "every_steps" begins with "every".
    const bool is_of_saves =
        std::any_of(std::begin(kOfSaves), std::end(kOfSaves),
                    [&](absl::string_view name) { return absl::StartsWith(option.path, name); });
    const bool asks_for_none = option.path == "every" && given.every == 0;
    if (!is_of_saves || asks_for_none || option.get() == unset.options()[i].get()) continue;
    return OptionError(absl::StrCat("checkpoint.", option.path), option.get(),
                       "has no effect without a folder for checkpoints: checkpoint.dir");
  }
  return absl::OkStatus();
}

// What can be known of it without data.
absl::Status CheckValidation(const TrainerOptions& options) {
  const double size = options.validation_size;
  if (size > 1 && size != std::floor(size)) {
    return OptionError("validation_size", FormatOption(size),
                       "is neither a whole number of examples nor a part below 1");
  }
  for (auto name = options.metrics.begin(); name != options.metrics.end(); ++name) {
    const absl::Status known = metrics::CheckMetricName(*name);
    if (!known.ok()) return OptionError("metrics", *name, known.message());
    if (std::find(options.metrics.begin(), name, *name) != name) {
      return OptionError("metrics", *name, "is given twice");
    }
  }
  return absl::OkStatus();
}

// Of an option that is switched off: what has no effect then.
absl::Status CheckUnused(const EarlyStoppingOptions& stopping, const GuardOptions& guard) {
  const EarlyStoppingOptions no_stopping;
  const GuardOptions no_guard;
  const auto has_no_effect = [](const char* option, double value, const char* without) {
    return OptionError(option, FormatOption(value),
                       absl::StrCat("has no effect without ", without));
  };
  if (stopping.metric.empty() && stopping.patience != no_stopping.patience) {
    return has_no_effect("early_stopping.patience", static_cast<double>(stopping.patience),
                         "early_stopping.metric");
  }
  if (stopping.metric.empty() && stopping.min_delta != no_stopping.min_delta) {
    return has_no_effect("early_stopping.min_delta", stopping.min_delta, "early_stopping.metric");
  }
  if (guard.on_anomaly != no_guard.on_anomaly) return absl::OkStatus();
  if (guard.anomaly_deviations != no_guard.anomaly_deviations) {
    return has_no_effect("guard.anomaly_deviations", guard.anomaly_deviations, "guard.on_anomaly");
  }
  if (guard.anomaly_window != no_guard.anomaly_window) {
    return has_no_effect("guard.anomaly_window", static_cast<double>(guard.anomaly_window),
                         "guard.on_anomaly");
  }
  return absl::OkStatus();
}

absl::Status CheckClipping(const TrainerOptions& options) {
  DDP_RETURN_IF_ERROR(ClipNormType(options).status());
  if (options.clip_norm > 0 && options.clip_value > 0) {
    return OptionError("clip_value", FormatOption(options.clip_value),
                       absl::StrCat("is given beside clip_norm=", options.clip_norm,
                                    ": gradients are clipped by value or by norm, not by both"));
  }
  if (options.clip_norm == 0 && options.clip_norm_type != TrainerOptions().clip_norm_type) {
    return OptionError("clip_norm_type", options.clip_norm_type, "has no effect without clip_norm");
  }
  return absl::OkStatus();
}

// What an Accelerator, or the loop around it, does; a group ends with a dot.
constexpr absl::string_view kTaken[] = {
    "epochs",         "max_steps",   "stop_at_step",   "max_time",        "stop_signals",
    "batch_size",     "drop_last",   "accumulate",     "eval_batch_size", "clip_norm",
    "clip_norm_type", "clip_value",  "seed",           "shuffle",         "prefetch_factor",
    "pin_memory",     "num_workers", "sync_bn",        "precision",       "even_batches",
    "optimizer.",     "schedule.",   "data_parallel.", "comm_hook.",      "zero.",
    "grad_scaler.",   "log.",        "checkpoint."};
constexpr absl::string_view kNotTaken[] = {"checkpoint.continuous", "checkpoint.every",
                                           "checkpoint.every_steps", "checkpoint.every_minutes"};

}  // namespace

absl::StatusOr<double> ClipNormType(const TrainerOptions& options) {
  if (options.clip_norm_type == "inf") return std::numeric_limits<double>::infinity();
  double p = 0;
  if (ParseOption(options.clip_norm_type, p).ok() && p > 0) return p;
  return OptionError("clip_norm_type", options.clip_norm_type,
                     "is neither a number above 0, the p of the p-norm, nor inf");
}

absl::Status Validate(const TrainerOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(
      InGroup("optimizer", OptimizerOf(options.optimizer, options.make_optimizer).status()));
  DDP_RETURN_IF_ERROR(InGroup(
      "schedule", Schedule::Create(options.schedule, RunLength(), options.lr_lambda).status()));
  DDP_RETURN_IF_ERROR(CheckClipping(options));
  DDP_RETURN_IF_ERROR(CheckValidation(options));
  DDP_RETURN_IF_ERROR(CheckUnused(options.early_stopping, options.guard));
  std::set<int> signals;
  for (const std::string& name : options.stop_signals) {
    const std::optional<int> signal = StopSignalOf(name);
    if (!signal) {
      return OptionError("stop_signals", name,
                         "is no signal that a run can be stopped by: TERM, INT, USR1 or USR2");
    }
    if (!signals.insert(*signal).second) return OptionError("stop_signals", name, "is given twice");
  }
  DDP_RETURN_IF_ERROR(InGroup("checkpoint", checkpoint::Validate(options.checkpoint.manager)));
  DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::Validate(options.comm_hook)));
  if (options.zero.stage == 2) {
    DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::WireDtypeOf(options.comm_hook).status()));
  }
  if (options.zero.stage == 2 && options.data_parallel.static_graph) {
    return OptionError("data_parallel.static_graph", "true",
                       "has no effect with zero.stage=2, which reduces gradients itself; use stage "
                       "0 or 1, or leave it out");
  }
  const std::string& resume = options.checkpoint.resume;
  if ((resume == "auto" || resume == "best") && options.checkpoint.manager.directory.empty()) {
    return OptionError("checkpoint.resume", resume, "needs a folder to look in: checkpoint.dir");
  }
  if (resume == "best" && options.checkpoint.manager.keep_best.empty()) {
    return OptionError("checkpoint.resume", resume,
                       "needs keep_best, which says by which metric a checkpoint is the best, as "
                       "test/accuracy:max does");
  }
  if (options.checkpoint.manager.directory.empty() && !options.eval_only) {
    DDP_RETURN_IF_ERROR(NothingAsksForSaves(options.checkpoint));
  }
  if (options.checkpoint.check_staging && !SavesAsync(options.checkpoint) && !options.eval_only) {
    return OptionError("checkpoint.check_staging", "true",
                       "has no effect without checkpoint.async or checkpoint.continuous, whose "
                       "copies it checks");
  }
  if (options.guard.on_anomaly == "rollback" && !options.eval_only) {
    if (options.checkpoint.manager.directory.empty()) {
      return OptionError("guard.on_anomaly", "rollback",
                         "needs a folder with checkpoints to go back to: checkpoint.dir");
    }
    if (!AsksForSaves(options.checkpoint)) {
      return OptionError(
          "guard.on_anomaly", "rollback",
          "needs checkpoints to go back to, and checkpoint.every=0 alone saves none");
    }
  }
  const std::string& init_from = options.checkpoint.init_from;
  if (options.eval_only && resume.empty() && init_from.empty()) {
    return OptionError("eval_only", "true",
                       "needs resume, a path or auto: the checkpoint to evaluate; or init_from");
  }
  if (!init_from.empty() && !resume.empty() && resume != "auto") {
    return OptionError("checkpoint.init_from", init_from,
                       absl::StrCat("begins a new run, and resume=", resume,
                                    " goes on with an old one: give one of the two, or resume=auto "
                                    "to go on with what this run itself has saved"));
  }
  if (init_from.empty() && !options.checkpoint.init_key.empty()) {
    return OptionError("checkpoint.init_key", options.checkpoint.init_key,
                       "has no effect without init_from");
  }
  if (init_from.empty() && !options.checkpoint.init_strict) {
    return OptionError("checkpoint.init_strict", "false", "has no effect without init_from");
  }
  if (init_from.empty() && !options.checkpoint.init_map.empty()) {
    return OptionError("checkpoint.init_map", options.checkpoint.init_map,
                       "has no effect without init_from");
  }
  DDP_RETURN_IF_ERROR(
      InGroup("checkpoint", checkpoint::NameMap::Parse(options.checkpoint.init_map).status()));
  DDP_RETURN_IF_ERROR(InGroup("early_stopping", EarlyStopping::Validate(options.early_stopping)));
  if (options.ema.decay == 0 && (options.ema.eval || options.ema.warmup)) {
    return OptionError(options.ema.eval ? "ema.eval" : "ema.warmup", "true",
                       "needs an average of the weights: ema.decay above 0");
  }
  if (options.ema.eval && options.eval_only && resume.empty()) {
    return OptionError("ema.eval", "true",
                       "needs a checkpoint of a run that had an average: resume, a path or auto");
  }
  if (!options.even_batches && !options.join.divide_by_initial_world_size &&
      options.zero.stage < 2 && options.comm_hook.name != "allreduce") {
    return OptionError("comm_hook.name", options.comm_hook.name,
                       "does not know how many ranks still have batches, which "
                       "join.divide_by_initial_world_size=false divides by; use allreduce, or "
                       "divide by all");
  }
  if (options.sync_bn != "none" && !options.even_batches &&
      !options.join.throw_on_early_termination) {
    return OptionError("sync_bn", options.sync_bn,
                       "communicates within forward, which ranks without batches cannot shadow: "
                       "it needs even_batches, or throw_on_early_termination");
  }
  return absl::OkStatus();
}

absl::Status ValidateForOwnLoop(const TrainerOptions& given) {
  TrainerOptions options = given, defaults;
  const OptionList list = ListOptions(options), otherwise = ListOptions(defaults);
  for (size_t i = 0; i < list.options().size(); ++i) {
    const OptionRef& option = list.options()[i];
    const auto names = [&](absl::string_view name) {
      return option.path == name ||
             (absl::EndsWith(name, ".") && absl::StartsWith(option.path, name));
    };
    const bool taken = std::any_of(std::begin(kTaken), std::end(kTaken), names) &&
                       std::none_of(std::begin(kNotTaken), std::end(kNotTaken), names);
    if (taken || option.get() == otherwise.options()[i].get()) continue;
    return OptionError(option.path, option.get(),
                       "is what Train does, and not a loop of one's own with an Accelerator");
  }
  if (!options.callbacks.empty() || options.on_step) {
    return absl::InvalidArgumentError(
        "TrainerOptions::callbacks and on_step are called by Train, and not by a loop of one's own "
        "with an Accelerator");
  }
  return Validate(options);
}

}  // namespace ddp::trainer
