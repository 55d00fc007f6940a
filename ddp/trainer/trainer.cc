#include "ddp/trainer/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "checkpoint/manager.h"
#include "ddp/clip_grad.h"
#include "ddp/data/loader.h"
#include "ddp/data/sampler.h"
#include "ddp/data_parallel.h"
#include "ddp/trainer/batch.h"
#include "ddp/trainer/channels_last.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/utils.h"

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

void UseChannelsLast(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.set_data(ChannelsLast(parameter));
  }
}

// One run of Train on one rank.
class TrainingRun {
 public:
  TrainingRun(const Session& session, const Task& task, const data::Dataset& train,
              const data::Dataset& test, const TrainerOptions& options)
      : session_(session), task_(task), train_(train), test_(test), options_(options) {}

  absl::StatusOr<Report> Execute() {
    // Each of these may fail on one rank alone; the others must not wait for it.
    DDP_RETURN_IF_ERROR(session_.Agree(CatchStatus("", [&] { return Prepare(); })));
    DDP_RETURN_IF_ERROR(session_.Agree(CatchStatus("", [&] { return Wrap(); })));
    DDP_RETURN_IF_ERROR(Resume());
    std::optional<Evaluation> evaluation;
    if (!options_.eval_only) {
      while (position_.epoch < options_.epochs && !Finished()) {
        DDP_ASSIGN_OR_RETURN(const bool complete, TrainEpoch());
        DDP_ASSIGN_OR_RETURN(evaluation, EvaluateEpoch());
        DDP_RETURN_IF_ERROR(MaybeSave(complete));
      }
    }
    if (!evaluation) {
      DDP_ASSIGN_OR_RETURN(evaluation, EvaluateEpoch());
    }
    DDP_RETURN_IF_ERROR(session_.Agree(log_->Flush()));
    return Report{*evaluation, position_.epoch, position_.step};
  }

 private:
  bool Finished() const { return options_.max_steps > 0 && position_.step >= options_.max_steps; }

  // Without talking to other ranks.
  absl::Status Prepare() {
    DDP_RETURN_IF_ERROR(Validate(options_));
    position_.seed = options_.seed;
    torch::manual_seed(static_cast<uint64_t>(options_.seed) +
                       static_cast<uint64_t>(session_.rank.rank));
    task_.module->to(session_.device);
    if (task_.channels_last) UseChannelsLast(*task_.module);
    DDP_ASSIGN_OR_RETURN(
        data::DistributedSampler sampler,
        data::DistributedSampler::Create(train_.size(), {.num_replicas = session_.rank.world_size,
                                                         .rank = session_.rank.rank,
                                                         .seed = options_.seed}));
    sampler_ = sampler;
    const int64_t batches = CeilDivide(sampler.num_samples(), options_.batch_size);
    steps_per_epoch_ = CeilDivide(batches, options_.accumulate);
    DDP_ASSIGN_OR_RETURN(schedule_, MakeSchedule());
    DDP_ASSIGN_OR_RETURN(optimizer_, MakeOptimizer(options_.optimizer, Parameters()));
    return OpenFolders();
  }

  absl::Status OpenFolders() {
    // To evaluate a file needs no folder to save in.
    const bool needs_manager = !options_.eval_only || options_.resume == "auto";
    if (!options_.checkpoint_dir.empty() && needs_manager) {
      absl::StatusOr<std::unique_ptr<checkpoint::Manager>> manager =
          checkpoint::Manager::Create({.directory = options_.checkpoint_dir,
                                       .format = options_.checkpoint_format,
                                       .rank = session_.rank.rank,
                                       .keep = options_.keep_checkpoints});
      DDP_RETURN_IF_ERROR(
          Annotate(manager.status(), absl::StrCat("checkpoint_dir=", options_.checkpoint_dir)));
      manager_ = *std::move(manager);
      if (options_.resume.empty()) DDP_RETURN_IF_ERROR(RefuseToOverwrite(""));
    }
    absl::StatusOr<std::unique_ptr<RunLog>> log = RunLog::Create(
        session_.is_main() ? options_.log_dir : "", options_.progress && session_.is_main());
    DDP_RETURN_IF_ERROR(Annotate(log.status(), absl::StrCat("log_dir=", options_.log_dir)));
    log_ = *std::move(log);
    return log_->Text("hyper_parameters", options_.hyper_parameters);
  }

  // A run that starts anew, or at a checkpoint that is not its folder's newest, would replace
  // checkpoints of another run, or later ones of this.
  absl::Status RefuseToOverwrite(const std::string& resumed) const {
    if (!session_.is_main() || manager_ == nullptr) return absl::OkStatus();
    absl::StatusOr<std::optional<std::string>> newest = manager_->Newest();
    if (newest.ok() && !newest->has_value()) return absl::OkStatus();
    std::error_code ignored;  // then they are not the same
    if (newest.ok() && std::filesystem::equivalent(**newest, resumed, ignored)) {
      return absl::OkStatus();
    }
    return absl::AlreadyExistsError(
        absl::StrCat("checkpoint_dir=", options_.checkpoint_dir, " holds a run's checkpoints (",
                     newest.ok() ? **newest : newest.status().message(),
                     "); continue it with resume=auto, or choose another folder"));
  }

  absl::Status Wrap() {
    if (task_.parallel != nullptr) return UseWrapper();
    DDP_ASSIGN_OR_RETURN(parallel_, DataParallel::Create(task_.module, session_.group.process_group,
                                                         options_.data_parallel));
    return absl::OkStatus();
  }

  // The caller's, with the options that it was made with.
  absl::Status UseWrapper() {
    if (task_.parallel->world_size() != session_.rank.world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", session_.rank.rank, ": the task's module is wrapped for ",
                       task_.parallel->world_size(), " ranks, but the session has ",
                       session_.rank.world_size, "; wrap it with the session's process group"));
    }
    parallel_ = task_.parallel;
    return absl::OkStatus();
  }

  // Rank 0 decides which file; every rank reads it.
  absl::Status Resume() {
    if (options_.resume.empty()) return absl::OkStatus();
    absl::StatusOr<std::string> chosen = options_.resume;
    if (options_.resume == "auto" && session_.is_main()) chosen = NewestCheckpoint();
    DDP_ASSIGN_OR_RETURN(const std::string path, session_.FromMain(chosen));
    if (path.empty()) {
      log_->Print(absl::StrCat("no checkpoint in ", options_.checkpoint_dir, ": starting anew"));
      return absl::OkStatus();
    }
    absl::Status restored = CatchStatus("", [&] { return Restore(path); });
    DDP_RETURN_IF_ERROR(
        session_.Agree(Annotate(restored, absl::StrCat("cannot resume from ", path))));
    log_->Print(absl::StrCat("resumed from ", path, ": epoch ", position_.epoch, ", step ",
                             position_.step));
    if (options_.eval_only) return absl::OkStatus();
    return session_.Agree(log_->ResumedAt(position_.step));
  }

  // To know the newest complete one is to have read it: it is kept for Restore.
  absl::StatusOr<std::string> NewestCheckpoint() {
    DDP_ASSIGN_OR_RETURN(newest_, manager_->LoadNewest());
    if (newest_) return newest_->path;
    if (!options_.eval_only) return "";
    return absl::NotFoundError(
        absl::StrCat("no checkpoint to evaluate in ", options_.checkpoint_dir));
  }

  absl::Status Restore(const std::string& path) {
    checkpoint::State state;
    if (newest_) {
      state = std::exchange(newest_, std::nullopt)->state;
    } else {
      DDP_ASSIGN_OR_RETURN(state, checkpoint::Manager::Load(path));
    }
    if (options_.eval_only) {
      DDP_ASSIGN_OR_RETURN(position_, RestoreModel(state, task_));
      return absl::OkStatus();
    }
    DDP_RETURN_IF_ERROR(RefuseToOverwrite(path));
    DDP_RETURN_IF_ERROR(CheckSeed(state, options_.seed));
    DDP_ASSIGN_OR_RETURN(position_, RestoreState(state, session_, task_, *optimizer_));
    for (const std::string& difference : ScheduleDifferences(state, *schedule_)) {
      log_->Print(absl::StrCat("the schedule is not the one it was saved with: ", difference));
    }
    return absl::OkStatus();
  }

  // Returns whether it came to the epoch's end: max_steps may have been reached before.
  absl::StatusOr<bool> TrainEpoch() {
    sampler_->set_epoch(position_.epoch);
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                         data::Loader::Create(train_, sampler_->Indices(),
                                              {.batch_size = options_.batch_size,
                                               .num_workers = options_.num_workers}));
    task_.module->train();
    log_->BeginEpoch(position_.epoch, options_.epochs, steps_per_epoch_,
                     options_.batch_size * options_.accumulate * session_.rank.world_size);
    int64_t left = loader->num_batches();
    int64_t step_in_epoch = 0;
    while (left > 0 && !Finished()) {
      const int64_t batches = std::min(left, options_.accumulate);
      DDP_ASSIGN_OR_RETURN(at::Tensor loss, Accumulate(*loader, batches));
      left -= batches;
      DDP_RETURN_IF_ERROR(Step(loss, ++step_in_epoch));
    }
    log_->EndEpoch();
    if (left == 0) ++position_.epoch;
    return left == 0;
  }

  // Adds up the gradients of `batches` batches, and synchronises them with the last. Returns the
  // mean loss.
  absl::StatusOr<at::Tensor> Accumulate(data::Loader& loader, int64_t batches) {
    at::Tensor total;
    for (int64_t i = 0; i < batches; ++i) {
      DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader.Next());
      const data::Batch there = ToDevice(*batch, session_.device, task_.channels_last);
      parallel_->set_require_backward_grad_sync(i + 1 == batches);
      parallel_->PreForward();
      const at::Tensor output = task_.forward(there.input);
      parallel_->PostForward({output});
      at::Tensor loss = task_.loss(output, there.target);
      if (batches > 1) loss = loss / static_cast<double>(batches);
      loss.backward();
      total = total.defined() ? total + loss.detach() : loss.detach();
    }
    return total;
  }

  absl::Status Step(const at::Tensor& loss, int64_t step_in_epoch) {
    const double lr = options_.optimizer.lr * schedule_->Factor(position_.step);
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
    std::optional<double> norm;
    if (options_.clip_norm > 0)
      norm = clip_grad_norm_(optimizer_->parameters(), options_.clip_norm);
    optimizer_->step();
    parallel_->zero_grad();
    ++position_.step;
    if (options_.on_step) options_.on_step(position_.step, loss);
    const bool due = position_.step % options_.log_every == 0 || position_.step == 1;
    return log_->Step(position_.step, step_in_epoch, due, loss, lr, norm);
  }

  absl::StatusOr<Evaluation> EvaluateEpoch() {
    // Each rank's running statistics have moved on their own since the last forward.
    DDP_RETURN_IF_ERROR(CatchStatus("sharing rank 0's buffers", [&] { parallel_->SyncBuffers(); }));
    DDP_ASSIGN_OR_RETURN(Evaluation evaluation, Evaluate(session_, task_, test_,
                                                         {.batch_size = options_.eval_batch_size,
                                                          .num_workers = options_.num_workers}));
    DDP_RETURN_IF_ERROR(log_->Evaluated(position_.epoch, position_.step, evaluation));
    return evaluation;
  }

  absl::Status MaybeSave(bool complete) {
    if (manager_ == nullptr || options_.checkpoint_every == 0) return absl::OkStatus();
    if (!complete) {
      log_->Print("max_steps ended the run within an epoch: that part of it is not saved");
      return absl::OkStatus();
    }
    const bool last = position_.epoch == options_.epochs || Finished();
    if (position_.epoch % options_.checkpoint_every != 0 && !last) return absl::OkStatus();
    DDP_ASSIGN_OR_RETURN(checkpoint::State state,
                         CaptureState(session_, task_, *optimizer_, *schedule_, position_));
    return session_.Agree(CatchStatus("saving a checkpoint", [&] {
      return manager_->Save(absl::StrCat("epoch_", position_.epoch), state, options_.save).status();
    }));
  }

  absl::StatusOr<Schedule> MakeSchedule() const {
    ScheduleOptions schedule;
    schedule.name = options_.schedule;
    schedule.warmup_steps = options_.warmup_steps;
    schedule.total_steps = std::max<int64_t>(1, options_.epochs * steps_per_epoch_);
    schedule.step_size = std::max<int64_t>(
        1, static_cast<int64_t>(options_.step_epochs * static_cast<double>(steps_per_epoch_)));
    schedule.gamma = options_.gamma;
    return Schedule::Create(schedule);
  }

  std::vector<at::Tensor> Parameters() const {
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : TrainableParameters(*task_.module)) {
      parameters.push_back(parameter);
    }
    return parameters;
  }

  static int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

  const Session& session_;
  const Task& task_;
  const data::Dataset& train_;
  const data::Dataset& test_;
  const TrainerOptions& options_;

  Position position_;
  int64_t steps_per_epoch_ = 0;
  std::optional<data::DistributedSampler> sampler_;
  std::optional<Schedule> schedule_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<checkpoint::Manager> manager_;
  std::optional<checkpoint::Loaded> newest_;  // rank 0, between choosing and restoring
  std::unique_ptr<RunLog> log_;
  std::shared_ptr<DataParallel> parallel_;
};

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
  DDP_RETURN_IF_ERROR(
      Within("bucket_cap_mb", options.data_parallel.bucket_cap_mb.value_or(1), 1e-6, 1 << 20));
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
  return CatchStatus("",
                     [&] { return TrainingRun(session, task, train, test, options).Execute(); });
}

std::string Summary(const Report& report, double wall_seconds) {
  return absl::StrFormat("test accuracy %.4f loss %.4f epochs %d wall %.1f s", report.test.accuracy,
                         report.test.loss, report.epochs, wall_seconds);
}

}  // namespace ddp::trainer
