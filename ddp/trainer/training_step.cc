#include "ddp/trainer/training_step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/gather/all_agree.h"
#include "ddp/model_tensors.h"
#include "ddp/sync_batch_norm.h"

namespace ddp::trainer {
namespace {

constexpr double kNoMaximum = std::numeric_limits<double>::infinity();

}  // namespace

absl::StatusOr<bool> TrainingStep::Take(data::AnyLoader& loader) {
  Record record;
  // Also after an error or an exception of a phase.
  const absl::Cleanup leave = [this] { LeavePhases(); };
  DDP_RETURN_IF_ERROR(BeginStep());
  for (size_t phase = 0; phase + 1 < run_.phases.size(); ++phase) {
    Enter(phase);
    DDP_RETURN_IF_ERROR(ForwardBackward(phase, loader).status());
    DDP_RETURN_IF_ERROR(UpdatePhase(phase, record));
  }
  Enter(run_.phases.size() - 1);
  DDP_ASSIGN_OR_RETURN(const bool has_all, ForwardBackward(run_.phases.size() - 1, loader));
  if (!has_all) return false;
  const Announced announced = Announce({.kind = kUpdate});
  DDP_RETURN_IF_ERROR(Update(record));
  return batches_left_ > 0 && !stopped_ && !IsInterrupted();
}

// Ranks that have run out of batches keep what the step changes on them, too.
absl::Status TrainingStep::BeginStep() {
  if (run_.guard == nullptr) return absl::OkStatus();
  const Announced announced = Announce({.kind = kBegin});
  return run_.guard->BeginStep(run_.position,
                               SamplesOf(std::min(batches_left_, run_.options.accumulate)));
}

// Only the parameters of this phase require gradients in it.
void TrainingStep::Enter(size_t phase) {
  if (run_.phases.size() == 1) return;
  is_in_phase_ = true;
  for (size_t i = 0; i < run_.phases.size(); ++i) {
    for (auto& [name, parameter] : run_.phases[i].parameters)
      parameter.set_requires_grad(i == phase);
  }
}

// Between two steps all parameters of the phases require gradients, as before the run: callbacks
// see them so, and whoever trains the module next.
void TrainingStep::LeavePhases() {
  if (!std::exchange(is_in_phase_, false)) return;
  for (RunPhase& phase : run_.phases) {
    for (auto& [name, parameter] : phase.parameters) parameter.set_requires_grad(true);
  }
}

// Adds up the gradients of the step's batches, and synchronises them with the last: sum of the
// losses' sums over all ranks / Divisor(). False: this rank has run out before, in a Join.
absl::StatusOr<bool> TrainingStep::ForwardBackward(size_t phase, data::AnyLoader& loader) {
  ModelWrapper& parallel = *run_.phases[phase].parallel;
  DistributedOptimizer& optimizer = *run_.phases[phase].optimizer;
  const StepContext context = {.session = run_.session,
                               .device = run_.session.device(),
                               .epoch = run_.position.epoch,
                               .step = run_.position.step};
  const auto batches = static_cast<size_t>(std::min(batches_left_, run_.options.accumulate));
  for (size_t i = 0; i < batches; ++i) {
    if (i == batches_.size()) {
      DDP_ASSIGN_OR_RETURN(std::optional<data::AnyBatch> batch,
                           run_.callbacks.WaitForData([&] { return loader.Next(); }));
      if (!batch && !run_.options.even_batches) return false;
      if (!batch) return absl::InternalError("the loader has fewer batches than it said");
      if (run_.guard != nullptr) run_.guard->AddExamples(batch->indices());
      batch->To(context.device);
      batches_.push_back(*std::move(batch));
    }
    if (IsAbandoned()) continue;
    parallel.set_require_backward_grad_sync(i + 1 == batches);
    run_.WaitForParameters();
    parallel.PreForward();
    const StepOutput output = FailTogether(*run_.task.module, [&] {
      return run_.phases[phase].phase->train_step(batches_[i], context);
    });
    DDP_RETURN_IF_ERROR(CheckOutput(phase, output, batches_[i]));
    parallel.PostForward({output.loss.value()});
    Add(phase, output);
    ExpectCount(phase, output.loss.count() * static_cast<double>(batches));
    if (i + 1 == batches) BeginToCount(phase);
    // The wrapper's mean over the ranks makes it a sum.
    optimizer.scale(output.loss.Scaled(run_.world_size(), Divisor(phase))).backward();
    if (phase + 1 == run_.phases.size()) batches_[i] = data::AnyBatch();
  }
  if (phase + 1 == run_.phases.size()) batches_.clear();
  return true;
}

// What comes after the last backward.
absl::Status TrainingStep::Update(Record& record) {
  DDP_RETURN_IF_ERROR(UpdatePhase(run_.phases.size() - 1, record));
  LeavePhases();
  if (IsInterrupted()) {
    ForgetValues();
    return absl::OkStatus();
  }
  return Finish(std::move(record));
}

// What comes after a phase's backward.
absl::Status TrainingStep::UpdatePhase(size_t phase, Record& metrics) {
  const TrainerOptions& options = run_.options;
  RunPhase& of_run = run_.phases[phase];
  DistributedOptimizer& optimizer = *of_run.optimizer;
  Sums& sums = sums_[phase];
  const bool due = IsDue();
  const auto record = [&](const char* tag, double value) {
    if (due) metrics.emplace_back(tag + of_run.suffix, value);
  };

  record("train/lr", of_run.scheduler->step());
  if (IsAbandoned()) {  // left out, or an earlier phase has ended it
    optimizer.zero_grad();
    return absl::OkStatus();
  }
  sums.counted = CountOfAllRanks(phase);
  if (sums.counted > 0) {
    const bool has_scale = optimizer.scaler().is_enabled();
    // Reading the scale waits for the device.
    const double scale = due && has_scale ? optimizer.scaler().get_scale() : 0;
    optimizer.unscale_(Divisor(phase) / sums.counted);
    DDP_RETURN_IF_ERROR(Watch(phase));
    if (IsAbandoned()) {
      optimizer.scaler().update();
      optimizer.zero_grad();
      return absl::OkStatus();
    }
    if (options.clip_norm > 0 || (due && options.monitor.gradient_norm)) {
      // An infinite maximum asks for the norm alone.
      const double most = options.clip_norm > 0 ? options.clip_norm : kNoMaximum;
      record("train/gradient_norm", optimizer.clip_grad_norm_(most, clip_norm_type_));
    }
    if (options.clip_value > 0) optimizer.clip_grad_value_(options.clip_value);
    if (has_scale) record("train/loss_scale", scale);
    if (!run_.task.counts_examples) {
      double& known = run_.position.loss_counts[phase];
      known = std::max(known, sums.counted);
    }
    optimizer.step();  // counts also if the scaler skips it
  } else if (std::has_single_bit(static_cast<uint64_t>(++sums.steps_without_count)) &&
             run_.is_main()) {
    run_.log->Warn(absl::StrCat("step ", run_.position.step + 1, " changes nothing",
                                of_run.phase->name.empty() ? "" : " in phase ", of_run.phase->name,
                                ": the losses of all ranks count 0 (are all labels masked?); such "
                                "steps so far: ",
                                sums.steps_without_count));
  }
  optimizer.zero_grad();
  sums.count = 0;
  return absl::OkStatus();
}

// Collective: whether the step goes on.
absl::Status TrainingStep::Watch(size_t phase) {
  if (run_.guard == nullptr) return absl::OkStatus();
  DistributedOptimizer& optimizer = *run_.phases[phase].optimizer;
  Sums& sums = sums_[phase];
  const Guard::Measured measured = {.loss = sums.loss.defined() ? sums.loss.item<double>() : 0,
                                    .count = sums.count,
                                    .all_counts = sums.counted,
                                    .norm = optimizer.clip_grad_norm_(kNoMaximum),
                                    .has_scaler = optimizer.scaler().is_enabled()};
  if (!IsDue()) sums.loss.reset();
  return run_.guard->Check(phase, measured);
}

absl::Status TrainingStep::Finish(Record record) {
  const TrainerOptions& options = run_.options;
  // A step that was skipped or left out has no values, and no callback is told of it.
  const bool abandoned = IsAbandoned();
  const bool due = IsDue() && !abandoned;
  if (abandoned) {
    ForgetValues();
    record.clear();
  }
  // Of the first phase.
  const double own_count = sums_[0].own_count;
  const at::Tensor own_loss = sums_[0].own_loss;
  for (Sums& sums : sums_) sums.ForgetOwn();

  Advance();
  DDP_RETURN_IF_ERROR(ReportSkipped());
  DDP_RETURN_IF_ERROR(CheckAgreement());
  if (IsInterrupted()) return absl::OkStatus();
  const at::Tensor loss = own_loss.defined() ? own_loss : at::zeros({});
  if (options.on_step && !abandoned) {
    run_.WaitForParameters();  // it may read them
    if (options.on_step(run_.position.step, loss) == StepAction::kStop) stops_.RequestByCallback();
  }
  if (!run_.callbacks.empty() && !abandoned) {
    run_.WaitForParameters();
    DDP_RETURN_IF_ERROR(run_.callbacks.StepEnd(loss, own_count, due, record));
    if (run_.callbacks.TakeRequest()) stops_.RequestByCallback(run_.callbacks.stop_reason());
  }

  std::optional<double> mean_loss;
  if (due) {
    DDP_RETURN_IF_ERROR(AddMeans(record, mean_loss));
    AddVolume(record);
  }
  std::vector<logging::Metric> metrics;
  for (const auto& [tag, value] : record) metrics.push_back({tag, value});
  DDP_RETURN_IF_ERROR(run_.log->Step(run_.position.step, step_in_epoch_, mean_loss, metrics));
  stopped_ = !ReachedLimit().empty();
  DDP_ASSIGN_OR_RETURN(const bool evaluated, run_.callbacks.Pause([&] {
    return evaluator_.AfterStep(/*more=*/batches_left_ > 0);
  }));
  if (!evaluated) {  // for a stop, which has been agreed on
    stopped_ = true;
    return absl::OkStatus();
  }
  DDP_RETURN_IF_ERROR(run_.callbacks.Pause(
      [&] { return saver_.AfterStep(/*more=*/batches_left_ > 0 && !stopped_); }));
  return GoOn();  // now: a request that comes while the run saves stops it here
}

absl::Status TrainingStep::GoOn() {
  if (stopped_) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const bool more, stops_.GoOn());
  stopped_ = !more;
  return absl::OkStatus();
}

void TrainingStep::Advance() {
  has_trained_ = true;
  Position& position = run_.position;
  ++position.step;
  if (run_.progress) run_.progress->Reached(position.step);
  ++step_in_epoch_;
  const int64_t batches = std::min(batches_left_, run_.options.accumulate);
  batches_left_ -= batches;
  batches_done_ += batches;
  position.sample += SamplesOf(batches);
}

// The last batch may be smaller. With padding the position may lie behind the epoch's end.
int64_t TrainingStep::SamplesOf(int64_t batches) const {
  return batches * run_.options.batch_size * run_.world_size();
}

absl::Status TrainingStep::CheckAgreement() {
  const int64_t every = run_.options.check_agreement_every;
  if (every == 0 || run_.position.step % every != 0) return absl::OkStatus();
  run_.WaitForParameters();
  // Frozen ones, too: nothing would mend a bit of theirs that has flipped.
  DDP_ASSIGN_OR_RETURN(const ModelTensors tensors,
                       CollectModelTensors(*run_.task.module, run_.Ignored()));
  const absl::Status same = Annotate(AllAgree(run_.session.process_group(), tensors.parameters),
                                     absl::StrCat("parameters after step ", run_.position.step));
  if (run_.guard == nullptr) return same;
  return run_.guard->Compared(run_.position, /*ends_epoch=*/batches_left_ == 0, same);
}

// The step itself ends here: what follows is its beginning and end, shadows and records.

TrainingStep::TrainingStep(Run& run, const StepPlan& plan, StopRequests& stops,
                           Evaluator& evaluator, Saver& saver)
    : run_(run),
      plan_(plan),
      stops_(stops),
      evaluator_(evaluator),
      saver_(saver),
      clip_norm_type_(*ClipNormType(run.options)) {
  sums_.resize(run_.phases.size());
  volume_ = VolumeSoFar();
  stopped_ = !ReachedLimit().empty();
}

std::string TrainingStep::ReachedLimit() const {
  const auto reached = [&](int64_t limit) { return limit > 0 && run_.position.step >= limit; };
  if (reached(run_.options.max_steps)) return absl::StrCat("max_steps=", run_.options.max_steps);
  if (reached(plan_.stop_at_step)) return absl::StrCat("stop_at_step=", plan_.stop_at_step);
  return "";
}

RunEnd TrainingStep::end() const {
  if (!stopped_) return {};
  const std::string limit = ReachedLimit();
  if (limit.empty()) return stops_.end();
  return {.reason =
              absl::StartsWith(limit, "max_steps") ? EndReason::kMaxSteps : EndReason::kStopAtStep};
}

// Of a step that is not completed.
void TrainingStep::ForgetValues() {
  for (Sums& sums : sums_) {
    sums.count = 0;
    sums.loss.reset();
    sums.ForgetOwn();
    sums.metrics.clear();
  }
  batches_.clear();
}

absl::Status TrainingStep::ReportSkipped() {
  if (run_.guard == nullptr) return absl::OkStatus();
  const std::optional<Anomaly> skipped = run_.guard->TakeSkipped();
  if (!skipped || !run_.is_main()) return absl::OkStatus();
  run_.log->Warn(absl::StrCat(skipped->what, "; the step is skipped"));
  return run_.log->Event(run_.position.step, "anomaly", skipped->fields);
}

void TrainingStep::BeginEpoch() {
  step_in_epoch_ = run_.StepsFrom(0) - run_.StepsFrom(run_.position.sample);
  batches_left_ = run_.BatchesFrom(run_.position.sample);
  first_sample_ = run_.position.sample;
  batches_done_ = 0;
  batches_.clear();  // a rank that ran out amid a step has left some
  if (volume_.step > run_.position.step) volume_ = VolumeSoFar();  // the run has rolled back
}

void TrainingStep::Shadow(const JoinOperation& operation) {
  // What this rank counts are batches of a step that it could not complete.
  // There is one phase (Prepare).
  if (operation.kind == kExpectCount) return ExpectCount(0, 0);
  if (operation.kind == kCount) return BeginToCount(0);
  Record record;
  shadow_status_ = operation.kind == kBegin ? BeginStep() : Update(record);
  // Leaves the Join, as the others do after an error of their body.
  if (!shadow_status_.ok()) throw std::runtime_error(std::string(shadow_status_.message()));
}

absl::Status TrainingStep::CheckOutput(size_t phase, const StepOutput& output,
                                       const data::AnyBatch& batch) const {
  const SumAndCount& loss = output.loss;
  const auto refuse = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("task '", run_.task.name, "': ", what...));
  };
  if (!loss.defined()) return refuse("its training step has given no loss");
  if (loss.value().numel() != 1) {
    return refuse(
        "the loss of a training step is one number, a sum over the batch or Mean(), but it has "
        "given ",
        loss.value().numel());
  }
  if (!loss.value().requires_grad()) {
    return refuse(
        "the loss of its training step has no gradient; make it of the module's outputs, "
        "also where it counts 0, as (losses * mask).sum() does");
  }
  if (!std::isfinite(loss.count()) || loss.count() < 0) {
    return refuse("the loss of its training step counts ", loss.count());
  }
  const auto examples = static_cast<double>(batch.indices().size());
  if (run_.task.counts_examples && loss.count() != examples) {
    return refuse("the loss of its training step counts ", loss.count(), " for a batch of ",
                  examples, " examples, but the task has counts_examples; leave that out");
  }
  return CheckMetricNames(run_.task, output.metrics, phase);
}

// What the losses' sums are divided by before backward. Sums of integers stay exact in the
// gradients by a power of two; UpdatePhase corrects the difference to the count.
double TrainingStep::Divisor(size_t phase) const {
  if (run_.has_mean_loss) return KnownCount();
  const double expected =
      run_.task.counts_examples ? ExamplesOfAFullStep() : run_.position.loss_counts[phase];
  return std::ldexp(1.0, std::ilogb(expected));
}

double TrainingStep::ExamplesOfAFullStep() const {
  return static_cast<double>(run_.options.batch_size * run_.options.accumulate) * run_.world_size();
}

// Collective in the run's first step, unless counts are known without: `count` is what this rank
// expects of the step.
void TrainingStep::ExpectCount(size_t phase, double count) {
  std::vector<double>& known = run_.position.loss_counts;
  if (run_.task.counts_examples || phase < known.size()) return;
  const Announced announced = Announce({.kind = kExpectCount});
  at::Tensor sum = at::full({1}, count, at::TensorOptions(join_device()).dtype(at::kDouble));
  std::vector<at::Tensor> sums = {sum};
  if (join_group()) join_group()->allreduce(sums)->wait();
  const double expected = sums[0].item<double>();
  known.push_back(expected > 0 ? expected : ExamplesOfAFullStep());
}

// Before the last backward of a step, which the message is under way with. Shadows wait for it now.
void TrainingStep::BeginToCount(size_t phase) {
  if (run_.task.counts_examples) return;
  const Announced announced = Announce({.kind = kCount});
  Sums& sums = sums_[phase];
  sums.all_counts = at::full({1}, sums.count, at::TensorOptions(join_device()).dtype(at::kDouble));
  if (!join_group()) return;
  std::vector<at::Tensor> counts = {sums.all_counts};
  sums.counting = join_group()->allreduce(counts);
  if (joined()) sums.counting->wait();
}

double TrainingStep::CountOfAllRanks(size_t phase) {
  if (run_.task.counts_examples) return KnownCount();
  Sums& sums = sums_[phase];
  if (auto counting = std::exchange(sums.counting, nullptr)) counting->wait();
  return sums.all_counts.item<double>();
}

// Of the step, over all ranks, if counts are numbers of examples.
double TrainingStep::KnownCount() const {
  return static_cast<double>(run_.ExamplesIn(first_sample_, batches_done_,
                                             std::min(batches_left_, run_.options.accumulate)));
}

void TrainingStep::Add(size_t phase, const StepOutput& output) {
  const SumAndCount& loss = output.loss;
  Sums& sums = sums_[phase];
  sums.count += loss.count();
  if (IsDue()) {
    for (const auto& [name, metric] : output.metrics) sums.metrics[name].Add(metric);
  }
  if (loss.count() == 0) return;
  if (run_.options.on_step || !run_.callbacks.empty()) {
    const double share = loss.count() / sums.count;
    at::Tensor& own = sums.own_loss;
    own = own.defined() ? own * (1 - share) + loss.mean() * share : loss.mean();
    sums.own_count = sums.count;
  }
  if (!IsDue() && run_.guard == nullptr) return;
  const at::Tensor sum = loss.double_sum();
  sums.loss = sums.loss.defined() ? sums.loss + sum : sum;
}

// Collective: over all ranks. A task by `forward` and `loss`, which has neither further phases nor
// metrics, needs no message but this.
absl::StatusOr<double> TrainingStep::SumOfLosses(Sums& sums) {
  const at::Tensor mine = std::exchange(sums.loss, at::Tensor());
  at::Tensor total = at::zeros({1}, at::TensorOptions(join_device()).dtype(at::kDouble));
  if (mine.defined()) total.select(0, 0).copy_(mine.reshape({}));
  if (join_group()) {
    DDP_RETURN_IF_ERROR(CatchCollective("averaging the loss", [&] {
      std::vector<at::Tensor> totals = {total};
      join_group()->allreduce(totals)->wait();
      total = totals[0];
      return absl::OkStatus();
    }));
  }
  return total.item<double>();
}

// Collective: the means over all ranks of the step's losses and metrics, in one exchange. A loss
// that counts nothing has no mean.
absl::Status TrainingStep::AddMeans(Record& record, std::optional<double>& loss) {
  // Of losses, under their phases' suffixes, and of metrics, under their tags.
  std::map<std::string, Total> totals;
  if (run_.has_mean_loss) {
    DDP_ASSIGN_OR_RETURN(totals[""].sum, SumOfLosses(sums_[0]));
  } else {
    for (size_t phase = 0; phase < sums_.size(); ++phase) {
      Sums& sums = sums_[phase];
      const std::string& suffix = run_.phases[phase].suffix;
      const at::Tensor mine = std::exchange(sums.loss, at::Tensor());
      totals[suffix].sum = mine.defined() ? mine.item<double>() : 0;
      for (const auto& [name, total] : std::exchange(sums.metrics, {})) {
        totals[absl::StrCat("train/", name, suffix)] = total;
      }
    }
    DDP_ASSIGN_OR_RETURN(totals, AddUp(join_group(), totals));
  }
  for (size_t phase = 0; phase < sums_.size(); ++phase) {
    const std::string& suffix = run_.phases[phase].suffix;
    const double sum = totals[suffix].sum;
    totals.erase(suffix);
    if (sums_[phase].counted == 0) continue;
    const double mean = sum / sums_[phase].counted;
    if (phase == 0) loss = mean;
    if (phase > 0) record.emplace_back(absl::StrCat("train/loss", suffix), mean);
  }
  for (const auto& [tag, total] : totals) record.emplace_back(tag, total.mean());
  return absl::OkStatus();
}

TrainingStep::Volume TrainingStep::VolumeSoFar() const {
  Volume now = {.step = run_.position.step, .gradients = 0};
  for (const RunPhase& phase : run_.phases) {
    const DistributedOptimizer::CommBytes bytes = phase.optimizer->comm_bytes();
    const std::optional<int64_t> reduced = phase.parallel->comm_bytes();
    if (!reduced) now.gradients = std::nullopt;
    if (now.gradients) *now.gradients += *reduced + bytes.gradients;
    if (bytes.parameters) now.parameters = now.parameters.value_or(0) + *bytes.parameters;
  }
  return now;
}

// What a step has sent, on average since the last call.
void TrainingStep::AddVolume(Record& record) {
  if (run_.world_size() == 1) return;
  const Volume now = VolumeSoFar();
  const auto steps = static_cast<double>(now.step - volume_.step);
  if (now.gradients) {
    record.emplace_back("train/comm_bytes",
                        static_cast<double>(*now.gradients - *volume_.gradients) / steps);
  }
  if (now.parameters) {
    record.emplace_back("train/gather_bytes",
                        static_cast<double>(*now.parameters - *volume_.parameters) / steps);
  }
  volume_ = now;
}

}  // namespace ddp::trainer
