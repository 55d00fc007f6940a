#include "ddp/trainer/training_step.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data_parallel.h"
#include "ddp/gather/all_agree.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/batch.h"

namespace ddp::trainer {

absl::StatusOr<bool> TrainingStep::Take(data::Loader& loader) {
  DDP_ASSIGN_OR_RETURN(const at::Tensor loss, ForwardBackward(loader));
  if (!loss.defined()) return false;
  const Announced announced = Announce({});
  DDP_RETURN_IF_ERROR(Update(loss));
  return batches_left_ > 0 && !stopped_;
}

// Adds up the gradients of the step's batches, and synchronises them with the last. Returns the
// mean loss; undefined if this rank has run out before, in a Join.
absl::StatusOr<at::Tensor> TrainingStep::ForwardBackward(data::Loader& loader) {
  const Task& task = run_.task;
  ModelWrapper& parallel = *run_.parallel;
  DistributedOptimizer& optimizer = *run_.optimizer;
  const int64_t batches = std::min(batches_left_, run_.options.accumulate);
  at::Tensor total;
  for (int64_t i = 0; i < batches; ++i) {
    DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader.Next());
    if (!batch && !run_.options.even_batches) return at::Tensor();
    if (!batch) return absl::InternalError("the loader has fewer batches than it said");
    const data::Batch there = ToDevice(*batch, run_.session.device(), task.channels_last);
    parallel.set_require_backward_grad_sync(i + 1 == batches);
    optimizer.WaitForParameters();
    parallel.PreForward();
    const at::Tensor output = FailTogether(*task.module, [&] { return task.forward(there.input); });
    parallel.PostForward({output});
    at::Tensor loss = task.loss(output, there.target);
    if (IsDue()) AddLoss(loss, there.input.size(0));
    if (batches > 1) loss = loss / static_cast<double>(batches);
    optimizer.scale(loss).backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  return total;
}

// What comes after backward.
absl::Status TrainingStep::Update(const at::Tensor& loss) {
  const TrainerOptions& options = run_.options;
  DistributedOptimizer& optimizer = *run_.optimizer;
  const bool due = IsDue();
  std::vector<logging::Metric> metrics;
  const auto record = [&](const char* tag, double value) {
    if (due) metrics.push_back({tag, value});
  };

  record("train/lr", run_.scheduler->step());
  // Reading the scale waits for the device.
  const double scale = due ? optimizer.scaler().get_scale() : 0;
  optimizer.unscale_();
  if (options.clip_norm > 0) {
    record("train/gradient_norm", optimizer.clip_grad_norm_(options.clip_norm));
  }
  if (optimizer.scaler().is_enabled()) record("train/loss_scale", scale);
  optimizer.step();  // counts also if the scaler skips it
  optimizer.zero_grad();

  Advance();
  DDP_RETURN_IF_ERROR(CheckAgreement());
  if (options.on_step) {
    optimizer.WaitForParameters();  // it may read them
    if (options.on_step(run_.position.step, loss) == StepAction::kStop) stop_->Request();
  }

  std::optional<double> mean_loss;
  if (due) {
    DDP_ASSIGN_OR_RETURN(mean_loss, MeanLoss());
    AddVolume(metrics);
  }
  DDP_RETURN_IF_ERROR(run_.log->Step(run_.position.step, step_in_epoch_, mean_loss, metrics));
  stopped_ = !ReachedLimit().empty();
  if (!stopped_ && stop_ != nullptr) {
    DDP_ASSIGN_OR_RETURN(const bool more, stop_->Enter(run_.position.step + 1));
    stopped_ = !more;
  }
  return saver_.AfterStep(/*more=*/batches_left_ > 0 && !stopped_);
}

void TrainingStep::Advance() {
  has_trained_ = true;
  Position& position = run_.position;
  ++position.step;
  ++step_in_epoch_;
  const int64_t batches = std::min(batches_left_, run_.options.accumulate);
  batches_left_ -= batches;
  // The last batch may be smaller. With padding the position may lie behind the epoch's end.
  position.sample += batches * run_.options.batch_size * run_.world_size();
}

absl::Status TrainingStep::CheckAgreement() {
  const int64_t every = run_.options.check_agreement_every;
  if (every == 0 || run_.position.step % every != 0) return absl::OkStatus();
  run_.optimizer->WaitForParameters();
  return Annotate(AllAgree(run_.session.process_group(), TrainableParameters(*run_.task.module)),
                  absl::StrCat("parameters after step ", run_.position.step));
}

// The step itself ends here: what follows is its beginning and end, shadows and records.

TrainingStep::TrainingStep(Run& run, const StepPlan& plan, StepAgreement* stop, Saver& saver)
    : run_(run), plan_(plan), stop_(stop), saver_(saver) {
  volume_ = VolumeSoFar();
  stopped_ = !ReachedLimit().empty();
}

std::string TrainingStep::ReachedLimit() const {
  const auto reached = [&](int64_t limit) { return limit > 0 && run_.position.step >= limit; };
  if (reached(run_.options.max_steps)) return absl::StrCat("max_steps=", run_.options.max_steps);
  if (reached(plan_.stop_at_step)) return absl::StrCat("stop_at_step=", plan_.stop_at_step);
  return "";
}

void TrainingStep::BeginEpoch() {
  step_in_epoch_ = run_.StepsFrom(0) - run_.StepsFrom(run_.position.sample);
  batches_left_ = run_.BatchesFrom(run_.position.sample);
}

void TrainingStep::Shadow(const JoinOperation&) {
  shadow_status_ = Update(at::zeros({}));
  // Leaves the Join, as the others do after an error of their body.
  if (!shadow_status_.ok()) throw std::runtime_error(std::string(shadow_status_.message()));
}

void TrainingStep::AddLoss(const at::Tensor& loss, int64_t examples) {
  const at::Tensor sum = loss.detach().to(at::kDouble) * examples;
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + sum : sum;
  loss_examples_ += examples;
}

// Collective: the mean over the examples of all ranks since the last call.
absl::StatusOr<double> TrainingStep::MeanLoss() {
  const at::TensorOptions options = at::TensorOptions(run_.session.device()).dtype(at::kDouble);
  const at::Tensor sum = std::exchange(loss_sum_, at::Tensor());
  std::vector<at::Tensor> sums = {at::full({2}, std::exchange(loss_examples_, 0), options)};
  if (sum.defined()) sums[0].select(0, 0).copy_(sum.reshape({}));
  if (run_.session.process_group()) {
    DDP_RETURN_IF_ERROR(CatchCollective("averaging the loss", [&] {
      run_.session.process_group()->allreduce(sums)->wait();
      return absl::OkStatus();
    }));
  }
  const at::Tensor total = sums[0].cpu();
  const double* values = total.const_data_ptr<double>();
  return values[0] / values[1];
}

TrainingStep::Volume TrainingStep::VolumeSoFar() const {
  const DistributedOptimizer::CommBytes bytes = run_.optimizer->comm_bytes();
  Volume now = {.step = run_.position.step,
                .gradients = run_.parallel->comm_bytes(),
                .parameters = bytes.parameters};
  if (now.gradients) *now.gradients += bytes.gradients;
  return now;
}

// What a step has sent, on average since the last call.
void TrainingStep::AddVolume(std::vector<logging::Metric>& metrics) {
  if (run_.world_size() == 1) return;
  const Volume now = VolumeSoFar();
  const auto steps = static_cast<double>(now.step - volume_.step);
  if (now.gradients) {
    metrics.push_back(
        {"train/comm_bytes", static_cast<double>(*now.gradients - *volume_.gradients) / steps});
  }
  if (now.parameters) {
    metrics.push_back(
        {"train/gather_bytes", static_cast<double>(*now.parameters - *volume_.parameters) / steps});
  }
  volume_ = now;
}

}  // namespace ddp::trainer
