#include "ddp/trainer/training_run.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/same_options.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "ddp/clip_grad.h"
#include "ddp/collective_status.h"
#include "ddp/data_parallel.h"
#include "ddp/gather/all_agree.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/batch.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {

absl::StatusOr<Report> TrainingRun::Execute() {
  // Each of these may fail on a single rank; Agree keeps the others from waiting for it.
  TrainerOptions options = options_;
  DDP_RETURN_IF_ERROR(RequireSameOptions(session_, ListOptions(options),
                                         CatchStatus("", [&] { return Prepare(); })));
  DDP_RETURN_IF_ERROR(OpenManager());
  DDP_RETURN_IF_ERROR(session_.Agree(CatchStatus("", [&] { return OpenLog(); })));
  // Collective: a rank that fails by itself must interrupt the others.
  const absl::Status wrapped = CatchCollective("", [&] { return Wrap(); });
  DDP_RETURN_IF_ERROR(wrapped.ok() ? session_.Agree(wrapped) : session_.ShareFailure(wrapped));
  DDP_RETURN_IF_ERROR(Resume());
  DDP_RETURN_IF_ERROR(session_.Agree(WriteConfiguration()));
  const absl::Status trained = CatchCollective("", [&] { return Run(); });
  DDP_RETURN_IF_ERROR(session_.ShareFailure(trained));
  if (stop_) stop_->Close();
  return Report{*evaluation_, position_.epoch, position_.step};
}

// No Agree after each step from here on: a failed rank interrupts the others (ShareFailure).
absl::Status TrainingRun::Run() {
  if (!options_.eval_only) {
    DDP_RETURN_IF_ERROR(AgreeOnSteps());
    volume_ = VolumeSoFar();
    stopped_ = !ReachedLimit().empty();
    if (stopped_ && position_.epoch < options_.epochs) {
      log_->Print(absl::StrCat(ReachedLimit(), " is reached, at step ", position_.step,
                               ": nothing is trained"));
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
  return session_.Agree(log_->Flush());
}

std::string TrainingRun::ReachedLimit() const {
  const auto reached = [&](int64_t limit) { return limit > 0 && position_.step >= limit; };
  if (reached(options_.max_steps)) return absl::StrCat("max_steps=", options_.max_steps);
  if (reached(stop_at_step_)) return absl::StrCat("stop_at_step=", stop_at_step_);
  return "";
}

// Modes that the user changes between the epochs stay, too, unless all is in evaluation mode.
void TrainingRun::EnterTraining() {
  if (std::exchange(trains_, true) && task_.module->is_training()) return;
  // A module may override it, to keep parts of itself in evaluation mode.
  task_.module->train();
  if (modes_) modes_->RestoreEval();
}

// Trains to the epoch's end, or to the run's last step.
absl::Status TrainingRun::TrainEpoch() {
  sampler_->set_epoch(position_.epoch);
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                       data::Loader::Create(train_, sampler_->Indices(position_.sample),
                                            {.batch_size = options_.batch_size,
                                             .drop_last = options_.drop_last,
                                             .num_workers = options_.num_workers}));
  EnterTraining();
  const int64_t steps = StepsFrom(0);
  step_in_epoch_ = steps - StepsFrom(position_.sample);
  log_->BeginEpoch(position_.epoch, options_.epochs, steps,
                   options_.batch_size * options_.accumulate * world_size(), step_in_epoch_);
  batches_left_ = BatchesFrom(position_.sample);
  if (options_.even_batches) {
    DDP_RETURN_IF_ERROR(TrainBatches(*loader));
  } else {
    std::vector<Joinable*> joinables = {dynamic_cast<Joinable*>(parallel_.get()), &step_in_join_};
    if (zero_ != nullptr) joinables.push_back(zero_);
    const absl::Status joined =
        Join(joinables, options_.join, [&] { return TrainBatches(*loader); });
    // A shadow's, of which `joined` has only the message.
    DDP_RETURN_IF_ERROR(step_in_join_.status);
    DDP_RETURN_IF_ERROR(joined);
  }
  log_->EndEpoch();
  if (zero_ != nullptr) zero_->WaitForParameters();
  if (batches_left_ == 0) {
    ++position_.epoch;
    position_.sample = 0;
  }
  return absl::OkStatus();
}

// Trains on as many batches as this rank has.
absl::Status TrainingRun::TrainBatches(data::Loader& loader) {
  while (batches_left_ > 0 && !stopped_) {
    DDP_ASSIGN_OR_RETURN(const at::Tensor loss,
                         Accumulate(loader, std::min(batches_left_, options_.accumulate)));
    if (!loss.defined()) break;
    DDP_RETURN_IF_ERROR(step_in_join_.Step(loss));
  }
  return absl::OkStatus();
}

// Adds up the gradients of `batches` batches, and synchronises them with the last. Returns the mean
// loss; undefined if this rank has run out before, in a Join.
absl::StatusOr<at::Tensor> TrainingRun::Accumulate(data::Loader& loader, int64_t batches) {
  at::Tensor total;
  for (int64_t i = 0; i < batches; ++i) {
    DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader.Next());
    if (!batch && !options_.even_batches) return at::Tensor();
    if (!batch) return absl::InternalError("the loader has fewer batches than it said");
    const data::Batch there = ToDevice(*batch, session_.device(), task_.channels_last);
    parallel_->set_require_backward_grad_sync(i + 1 == batches);
    if (zero_ != nullptr) zero_->WaitForParameters();
    parallel_->PreForward();
    const at::Tensor output =
        FailTogether(*task_.module, [&] { return task_.forward(there.input); });
    parallel_->PostForward({output});
    at::Tensor loss = task_.loss(output, there.target);
    if (IsDue()) {
      const int64_t examples = there.input.size(0);
      const at::Tensor sum = loss.detach().to(at::kDouble) * examples;
      loss_sum_ = loss_sum_.defined() ? loss_sum_ + sum : sum;
      loss_examples_ += examples;
    }
    if (batches > 1) loss = loss / static_cast<double>(batches);
    (scaler_ ? scaler_->scale(loss) : loss).backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  return total;
}

absl::Status TrainingRun::StepInJoin::Step(const at::Tensor& loss) {
  const Announced announced = Announce({});
  return run_.TakeStep(loss);
}

void TrainingRun::StepInJoin::Shadow(const JoinOperation&) {
  status = run_.TakeStep(at::zeros({}));
  // Leaves the Join, as the others do after an error of their body.
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

absl::Status TrainingRun::TakeStep(const at::Tensor& loss) {
  const bool due = IsDue();
  const double lr = options_.optimizer.lr * schedule_->Factor(position_.step);
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
  std::optional<double> norm, loss_scale;
  if (scaler_) {
    // Reading it waits for the device.
    if (due) loss_scale = scaler_->get_scale();
    scaler_->unscale_(*optimizer_);
  }
  if (options_.clip_norm > 0) {
    norm = zero_ != nullptr ? zero_->clip_grad_norm_(options_.clip_norm)
                            : clip_grad_norm_(parameters_, options_.clip_norm);
  }
  if (scaler_) {
    // The scaler may skip the step, which counts all the same.
    scaler_->step(*optimizer_);
    scaler_->update();
  } else {
    optimizer_->step();
  }
  if (zero_ != nullptr) {
    zero_->zero_grad();
  } else {
    parallel_->zero_grad(/*set_to_none=*/true);
  }
  trained_ = true;
  ++position_.step;
  if (options_.check_agreement_every > 0 && position_.step % options_.check_agreement_every == 0) {
    if (zero_ != nullptr) zero_->WaitForParameters();
    DDP_RETURN_IF_ERROR(
        Annotate(AllAgree(session_.process_group(), TrainableParameters(*task_.module)),
                 absl::StrCat("parameters after step ", position_.step)));
  }
  ++step_in_epoch_;
  const int64_t batches = std::min(batches_left_, options_.accumulate);
  batches_left_ -= batches;
  // The last batch may be smaller. With padding the position may lie behind the epoch's end.
  position_.sample += batches * options_.batch_size * world_size();
  // on_step may read parameters.
  if (zero_ != nullptr && options_.on_step) zero_->WaitForParameters();
  if (options_.on_step && options_.on_step(position_.step, loss) == StepAction::kStop) {
    stop_->Request();
  }
  std::optional<double> mean_loss;
  std::vector<logging::Metric> metrics;
  if (due) {
    DDP_ASSIGN_OR_RETURN(mean_loss, MeanLoss());
    metrics.push_back({"train/lr", lr});
    if (norm) metrics.push_back({"train/gradient_norm", *norm});
    if (loss_scale) metrics.push_back({"train/loss_scale", *loss_scale});
    AddVolume(metrics);
  }
  DDP_RETURN_IF_ERROR(log_->Step(position_.step, step_in_epoch_, mean_loss, metrics));
  stopped_ = !ReachedLimit().empty();
  if (!stopped_ && stop_) {
    DDP_ASSIGN_OR_RETURN(const bool more, stop_->Enter(position_.step + 1));
    stopped_ = !more;
  }
  return absl::OkStatus();
}

// Collective: the mean over the examples of all ranks since the last call.
absl::StatusOr<double> TrainingRun::MeanLoss() {
  const at::TensorOptions options = at::TensorOptions(session_.device()).dtype(at::kDouble);
  const at::Tensor sum = std::exchange(loss_sum_, at::Tensor());
  std::vector<at::Tensor> sums = {at::full({2}, std::exchange(loss_examples_, 0), options)};
  if (sum.defined()) sums[0].select(0, 0).copy_(sum.reshape({}));
  if (session_.process_group()) {
    DDP_RETURN_IF_ERROR(CatchCollective("averaging the loss", [&] {
      session_.process_group()->allreduce(sums)->wait();
      return absl::OkStatus();
    }));
  }
  const at::Tensor total = sums[0].cpu();
  const double* values = total.const_data_ptr<double>();
  return values[0] / values[1];
}

TrainingRun::Volume TrainingRun::VolumeSoFar() const {
  Volume now = {.step = position_.step, .gradients = parallel_->comm_bytes()};
  if (zero_ != nullptr) {
    const auto zero = zero_->comm_bytes();
    if (now.gradients) *now.gradients += zero.gradients;
    now.parameters = zero.parameters;
  }
  return now;
}

// What a step has sent, on average since the last call.
void TrainingRun::AddVolume(std::vector<logging::Metric>& metrics) {
  if (world_size() == 1) return;
  const Volume now = VolumeSoFar();
  const auto steps = static_cast<double>(now.step - volume_.step);
  if (now.gradients) {
    metrics.push_back(
        {"train/comm_bytes", static_cast<double>(*now.gradients - *volume_.gradients) / steps});
  }
  if (zero_ != nullptr) {
    metrics.push_back(
        {"train/gather_bytes", static_cast<double>(now.parameters - volume_.parameters) / steps});
  }
  volume_ = now;
}

absl::Status TrainingRun::EvaluateNow() {
  Predictions predictions;
  const bool collect = !options_.predictions.empty();
  DDP_ASSIGN_OR_RETURN(evaluation_, Evaluate(session_, task_, test_,
                                             {.batch_size = options_.eval_batch_size,
                                              .num_workers = options_.num_workers},
                                             collect ? &predictions : nullptr));
  // Rank 0 writes alone, which may take long: the others wait here and not in a collective.
  absl::Status written;
  if (collect && is_main()) written = WritePredictions(predictions, options_.predictions);
  if (written.ok()) {
    written = log_->Evaluated(position_.epoch, position_.step, *evaluation_,
                              /*record=*/trained_ || options_.eval_only);
  }
  return session_.Agree(written);
}

// Whether the run saves at the end of this epoch.
bool TrainingRun::SavesNow() const {
  return position_.epoch == options_.epochs || stopped_ ||
         (options_.checkpoint.every > 0 && position_.epoch % options_.checkpoint.every == 0);
}

absl::Status TrainingRun::Save(const std::string& name) {
  if (manager_ == nullptr || options_.checkpoint.every == 0) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(checkpoint::State state,
                       CaptureState(session_, task_, *optimizer_, options_.optimizer.lr, *schedule_,
                                    position_, scaler_.get()));
  // The manager saves rank 0's; others may have another one before the second step.
  const std::vector<int64_t> bucket_order = parallel_->bucket_order();
  if (!bucket_order.empty()) {
    state.root.insert("bucket_order", c10::List<int64_t>(bucket_order));
  }
  if (!options_.configuration.empty()) state.root.insert("config", options_.configuration);
  return manager_->Save(name, std::move(state), options_.checkpoint.save).status();
}

}  // namespace ddp::trainer
