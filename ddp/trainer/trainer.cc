#include "ddp/trainer/trainer.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "ddp/trainer/training_run.h"

namespace ddp::trainer {
namespace {

// More than anybody means, and far from where products of two overflow.
constexpr double kMost = 1e9;

absl::Status Within(absl::string_view name, double value, double least, double most = kMost) {
  if (value >= least && value <= most) return absl::OkStatus();
  if (value > most) {
    return absl::InvalidArgumentError(absl::StrCat(name, "=", value, " must be at most ", most));
  }
  return absl::InvalidArgumentError(absl::StrCat(name, "=", value, " must be at least ", least));
}

}  // namespace

absl::Status Validate(const TrainerOptions& options) {
  DDP_RETURN_IF_ERROR(Within("epochs", static_cast<double>(options.epochs), 0));
  DDP_RETURN_IF_ERROR(Within("max_steps", static_cast<double>(options.max_steps), 0));
  DDP_RETURN_IF_ERROR(Within("batch_size", static_cast<double>(options.batch_size), 1));
  DDP_RETURN_IF_ERROR(Within("eval_batch_size", static_cast<double>(options.eval_batch_size), 1));
  DDP_RETURN_IF_ERROR(Within("accumulate", static_cast<double>(options.accumulate), 1));
  DDP_RETURN_IF_ERROR(Within("clip_norm", options.clip_norm, 0));
  DDP_RETURN_IF_ERROR(Within("num_workers", options.num_workers, 0));
  DDP_RETURN_IF_ERROR(Within("log_every", static_cast<double>(options.log_every), 1));
  DDP_RETURN_IF_ERROR(Within("checkpoint_every", static_cast<double>(options.checkpoint_every), 0));
  DDP_RETURN_IF_ERROR(Within("keep_checkpoints", options.keep_checkpoints, 0));
  DDP_RETURN_IF_ERROR(Within("step_epochs", options.step_epochs, 1e-6));
  DDP_RETURN_IF_ERROR(Within("gamma", options.gamma, 0));
  DDP_RETURN_IF_ERROR(Within("bucket_cap_mb", options.data_parallel.bucket_cap_mb, 1e-6, 1 << 20));
  if (options.data_parallel.static_graph && options.accumulate > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("accumulate=", options.accumulate, " cannot be combined with static_graph"));
  }
  DDP_RETURN_IF_ERROR(Schedule::Create({.name = options.schedule,
                                        .warmup_steps = options.warmup_steps,
                                        .total_steps = 1,
                                        .step_size = 1})
                          .status());
  DDP_RETURN_IF_ERROR(Validate(options.optimizer));
  DDP_RETURN_IF_ERROR(checkpoint::CreateFormat(options.checkpoint_format).status());
  if (options.resume == "auto" && options.checkpoint_dir.empty()) {
    return absl::InvalidArgumentError("resume=auto needs a checkpoint_dir to look in");
  }
  if (options.eval_only && options.resume.empty()) {
    return absl::InvalidArgumentError(
        "eval_only needs resume=PATH or resume=auto: what to evaluate");
  }
  return absl::OkStatus();
}

absl::StatusOr<Report> Train(const Session& session, const Task& task, const data::Dataset& train,
                             const data::Dataset& test, const TrainerOptions& options) {
  return TrainingRun(session, task, train, test, options).Execute();
}

std::string Summary(const Report& report, double wall_seconds) {
  return absl::StrFormat("test accuracy %.4f loss %.4f epochs %d wall %.1f s", report.test.accuracy,
                         report.test.loss, report.epochs, wall_seconds);
}

}  // namespace ddp::trainer
