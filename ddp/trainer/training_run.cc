#include "ddp/trainer/training_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "ddp/clip_grad.h"
#include "ddp/trainer/batch.h"
#include "ddp/trainer/failure.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {

absl::StatusOr<Report> TrainingRun::Execute() {
  // Each of these may fail on a single rank; Agree keeps the others from waiting for it.
  DDP_RETURN_IF_ERROR(Agree(CatchStatus("", [&] { return Prepare(); })));
  DDP_RETURN_IF_ERROR(OpenManager());
  DDP_RETURN_IF_ERROR(Agree(CatchStatus("", [&] { return OpenLog(); })));
  DDP_RETURN_IF_ERROR(Agree(CatchStatus("", [&] { return Wrap(); })));
  DDP_RETURN_IF_ERROR(Resume());
  absl::Status status = CatchCollective("", [&] { return Run(); });
  if (!status.ok() && !all_know_) status = ShareFailure(session_, status);
  DDP_RETURN_IF_ERROR(status);
  if (stop_) stop_->Close();
  return Report{*evaluation_, position_.epoch, position_.step};
}

// No Agree after each step from here on: a failed rank uses ShareFailure.
absl::Status TrainingRun::Run() {
  if (!options_.eval_only) {
    DDP_RETURN_IF_ERROR(ListenForStop());
    stopped_ = ReachedMaxSteps();
    if (stopped_ && position_.epoch < options_.epochs) {
      log_->Print(absl::StrCat("max_steps=", options_.max_steps, " is reached, at step ",
                               position_.step, ": nothing is trained"));
    }
    while (position_.epoch < options_.epochs && !stopped_) {
      DDP_RETURN_IF_ERROR(TrainEpoch());
      // Each rank has updated its running statistics since the last broadcast.
      DDP_RETURN_IF_ERROR(CatchCollective("sharing rank 0's buffers", [&] {
        parallel_->SyncBuffers();
        return absl::OkStatus();
      }));
      if (position_.sample > 0) {
        // Save before the evaluation, which an uninterrupted run does not do here and which may use
        // random numbers.
        DDP_RETURN_IF_ERROR(Save(checkpoint::EpochStepName(position_.epoch, position_.step)));
        DDP_RETURN_IF_ERROR(EvaluateNow());
      } else {
        DDP_RETURN_IF_ERROR(EvaluateNow());
        if (SavesNow()) DDP_RETURN_IF_ERROR(Save(checkpoint::EpochName(position_.epoch)));
      }
    }
  }
  if (!evaluation_) DDP_RETURN_IF_ERROR(EvaluateNow());
  return Agree(log_->Flush());
}

absl::Status TrainingRun::Agree(const absl::Status& mine) {
  absl::Status agreed = session_.Agree(mine);
  all_know_ |= !agreed.ok();
  return agreed;
}

// To the epoch's end, or to the run's last step.
absl::Status TrainingRun::TrainEpoch() {
  sampler_->set_epoch(position_.epoch);
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                       data::Loader::Create(train_, sampler_->Indices(position_.sample),
                                            {.batch_size = options_.batch_size,
                                             .num_workers = options_.num_workers}));
  task_.module->train();
  const int64_t steps = StepsFrom(0);
  step_in_epoch_ = steps - StepsFrom(position_.sample);
  log_->BeginEpoch(position_.epoch, options_.epochs, steps,
                   options_.batch_size * options_.accumulate * world_size(), step_in_epoch_);
  int64_t left = loader->num_batches();
  while (left > 0 && !stopped_) {
    const int64_t batches = std::min(left, options_.accumulate);
    DDP_ASSIGN_OR_RETURN(at::Tensor loss, Accumulate(*loader, batches));
    left -= batches;
    DDP_RETURN_IF_ERROR(Step(loss));
  }
  log_->EndEpoch();
  if (zero_ != nullptr) zero_->WaitForParameters();
  if (left == 0) {
    ++position_.epoch;
    position_.sample = 0;
  }
  return absl::OkStatus();
}

// Adds up the gradients of `batches` batches, and synchronises them with the last. Returns the mean
// loss.
absl::StatusOr<at::Tensor> TrainingRun::Accumulate(data::Loader& loader, int64_t batches) {
  at::Tensor total;
  examples_ = 0;
  for (int64_t i = 0; i < batches; ++i) {
    DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader.Next());
    if (!batch) return absl::InternalError("the loader has fewer batches than it said");
    examples_ += batch->input.size(0);
    const data::Batch there = ToDevice(*batch, session_.device(), task_.channels_last);
    parallel_->set_require_backward_grad_sync(i + 1 == batches);
    if (zero_ != nullptr) zero_->WaitForParameters();
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

absl::Status TrainingRun::Step(const at::Tensor& loss) {
  const double lr = options_.optimizer.lr * schedule_->Factor(position_.step);
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  std::optional<double> norm;
  if (options_.clip_norm > 0) {
    norm = zero_ != nullptr ? zero_->clip_grad_norm_(options_.clip_norm)
                            : clip_grad_norm_(optimizer_->parameters(), options_.clip_norm);
  }
  optimizer_->step();
  parallel_->zero_grad();
  trained_ = true;
  ++position_.step;
  ++step_in_epoch_;
  position_.sample += examples_ * world_size();  // the same number on all ranks
  if (options_.on_step && options_.on_step(position_.step, loss) == StepAction::kStop) {
    stop_->Request();
  }
  const bool due = position_.step % options_.log.every == 0 || position_.step == 1;
  DDP_RETURN_IF_ERROR(log_->Step(position_.step, step_in_epoch_, due, loss, lr, norm));
  stopped_ = ReachedMaxSteps();
  if (!stopped_ && stop_) {
    DDP_ASSIGN_OR_RETURN(const bool more, stop_->Enter(position_.step + 1));
    stopped_ = !more;
  }
  return absl::OkStatus();
}

absl::Status TrainingRun::EvaluateNow() {
  DDP_ASSIGN_OR_RETURN(evaluation_, Evaluate(session_, task_, test_,
                                             {.batch_size = options_.eval_batch_size,
                                              .num_workers = options_.num_workers}));
  return log_->Evaluated(position_.epoch, position_.step, *evaluation_,
                         /*record=*/trained_ || options_.eval_only);
}

// At the end of an epoch.
bool TrainingRun::SavesNow() const {
  return position_.epoch == options_.epochs || stopped_ ||
         (options_.checkpoint.every > 0 && position_.epoch % options_.checkpoint.every == 0);
}

absl::Status TrainingRun::Save(const std::string& name) {
  if (manager_ == nullptr || options_.checkpoint.every == 0) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(checkpoint::State state,
                       CaptureState(session_, task_, *optimizer_, *schedule_, position_));
  const absl::Status saved =
      manager_->Save(name, std::move(state), options_.checkpoint.save).status();
  all_know_ |= !saved.ok();
  return saved;
}

}  // namespace ddp::trainer
