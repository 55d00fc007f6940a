#include "ddp/trainer/evaluator.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/option_error.h"
#include "base/option_list.h"
#include "base/status.h"
#include "checkpoint/retention.h"
#include "checkpoint/rng_state.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::trainer {
namespace {

// c10d logs each wait that times out.
constexpr std::chrono::hours kWaitForRequest(1);

// Torch's generators on the CPU and on a device, as they were when it was made.
class KeptGenerators {
 public:
  explicit KeptGenerators(c10::Device device) : device_(device), cpu_(checkpoint::RngState()) {
    if (!device.is_cpu()) on_device_ = checkpoint::RngState(device);
  }

  absl::Status Restore() const {
    DDP_RETURN_IF_ERROR(checkpoint::LoadRngState(cpu_));
    return on_device_.defined() ? checkpoint::LoadRngState(on_device_, device_) : absl::OkStatus();
  }

 private:
  const c10::Device device_;
  const at::Tensor cpu_;
  at::Tensor on_device_;
};

}  // namespace

std::set<std::pair<std::string, std::string>> MetricsInOptions(const Run& run) {
  const TrainerOptions& options = run.options;
  std::set<std::pair<std::string, std::string>> metrics;
  for (const auto& [option, text] :
       {std::pair("checkpoint.keep_best", &options.checkpoint.manager.keep_best),
        std::pair("early_stopping.metric", &options.early_stopping.metric)}) {
    // What is only evaluated has been chosen already, or is, by the values of its checkpoints.
    if (options.eval_only && text == &options.checkpoint.manager.keep_best) continue;
    if (!text->empty()) metrics.emplace(option, checkpoint::ParseBestMetric(*text)->metric);
  }
  for (const Phase& phase : run.task.phases) {
    const ScheduleOptions& schedule = phase.schedule.value_or(options.schedule);
    if (schedule.name != "plateau") continue;
    metrics.emplace("schedule.plateau.metric", schedule.plateau.metric);
  }
  return metrics;
}

void Evaluator::Begin(const c10::intrusive_ptr<c10d::Store>& store, StopRequests& stops) {
  stops_ = &stops;
  last_ = absl::Now();
  if (run_.validation == nullptr || run_.options.validate.every_minutes == 0) return;
  c10::intrusive_ptr<c10d::Store> own;
  if (store) own = c10::make_intrusive<c10d::PrefixStore>("validate", store);
  agreement_.emplace(std::move(own), run_.rank(), run_.world_size(), run_.position.step + 1,
                     kWaitForRequest);
}

absl::Status Evaluator::TryMetrics() {
  const auto named = MetricsInOptions(run_);
  const std::string& path = run_.options.predictions;
  const bool has_metrics =
      !named.empty() || run_.task.metrics != nullptr || !run_.task.metric_names.empty();
  if (!has_metrics && path.empty()) return absl::OkStatus();
  const auto evaluate = [&](const data::AnyDataset& dataset, Predictions* predictions) {
    std::vector<int64_t> first(
        static_cast<size_t>(std::min<int64_t>(dataset.size(), run_.world_size())));
    std::iota(first.begin(), first.end(), 0);
    return trainer::Evaluate(run_.session, run_.task, data::Subset(dataset, std::move(first)),
                             {.batch_size = 1}, predictions);
  };
  const KeptGenerators generators(run_.session.device());
  if (!path.empty()) {
    Predictions predictions;
    const absl::Status tried = evaluate(*run_.test, &predictions).status();
    if (absl::IsInvalidArgument(tried)) {
      return OptionError("predictions", path, absl::StrCat("cannot be written: ", tried.message()));
    }
    DDP_RETURN_IF_ERROR(tried);
  }
  if (!has_metrics) return generators.Restore();
  const bool validates = run_.validation != nullptr;
  std::map<std::string, double> values;
  for (const bool of_validation : {true, false}) {
    // During a run the test data beside validation data are not evaluated.
    const bool is_evaluated = of_validation            ? validates
                              : run_.options.eval_only ? run_.test->size() > 0
                                                       : !validates;
    if (!is_evaluated) continue;
    DDP_ASSIGN_OR_RETURN(const Evaluation tried,
                         evaluate(of_validation ? *run_.validation : *run_.test, nullptr));
    values.merge(Metrics(tried, of_validation ? kValidation : kTest));
  }
  for (const auto& [option, metric] : named) {
    if (values.contains(metric)) continue;
    std::vector<std::string> names;
    for (const auto& [name, value] : values) names.push_back(name);
    return OptionError(option, metric,
                       absl::StrCat("is no value of this run's evaluation, which has ",
                                    absl::StrJoin(names, ", "), DidYouMean(metric, names)),
                       absl::StatusCode::kNotFound);
  }
  return generators.Restore();
}

absl::StatusOr<bool> Evaluator::ValidateIfDue(bool more) {
  if (agreement_) {
    const int64_t step = run_.position.step;
    const absl::Duration every = absl::Minutes(1) * run_.options.validate.every_minutes;
    if (run_.is_main() && absl::Now() - last_ >= every) agreement_->Request();
    DDP_ASSIGN_OR_RETURN(const bool goes_on, agreement_->Enter(step + 1));
    if (!goes_on) {
      agreement_->Renew(step + 1);
      is_due_ = true;
    }
  }
  if (!more || !(is_due_ || IsDueByStep())) return true;
  return ValidateWithinEpoch();
}

// A checkpoint knows after which step its run has validated.
bool Evaluator::IsDueByStep() const {
  const int64_t every = run_.options.validate.every_steps, step = run_.position.step;
  return run_.validation != nullptr && every > 0 && step > 0 && step % every == 0 &&
         step != run_.position.validated_step;
}

absl::StatusOr<bool> Evaluator::CatchUp(bool record) {
  // Of steps that a run which has rolled back takes again.
  ForgetEvaluations();
  const int64_t sample = run_.position.sample;
  if (sample == 0 || run_.BatchesFrom(sample) == 0 || !IsDueByStep()) return true;
  return ValidateWithinEpoch(record);
}

absl::StatusOr<bool> Evaluator::ValidateWithinEpoch(bool record) {
  bool evaluated = false;
  DDP_RETURN_IF_ERROR(run_.WithSharedBuffers([&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(evaluated, Evaluate(/*validation=*/true, /*test=*/false, record));
    return absl::OkStatus();
  }));
  if (evaluated) DDP_RETURN_IF_ERROR(CountInSchedules());
  return evaluated;
}

bool Evaluator::IsDueAtEpochEnd() const {
  const int64_t epoch = run_.position.epoch, every = run_.options.validate.every;
  return run_.validation == nullptr || is_due_ || IsDueByStep() || epoch == run_.options.epochs ||
         (every > 0 && epoch % every == 0);
}

absl::StatusOr<bool> Evaluator::AtEpochEnd(bool record) {
  const bool validates = run_.validation != nullptr;
  const bool is_last = run_.position.epoch == run_.options.epochs;
  DDP_ASSIGN_OR_RETURN(const bool evaluated,
                       Evaluate(validates, /*test=*/(is_last && HasTest()) || !validates, record));
  if (evaluated) DDP_RETURN_IF_ERROR(CountInSchedules());
  return evaluated;
}

absl::StatusOr<bool> Evaluator::Rest(bool record) {
  const bool validation = run_.validation != nullptr && !has_validated_;
  const bool test = HasTest() && !has_tested_;
  if (!validation && !test) return true;
  return Evaluate(validation, test, record);
}

absl::Status Evaluator::CountInSchedules() {
  for (RunPhase& phase : run_.phases) {
    DDP_RETURN_IF_ERROR(phase.scheduler->Evaluated(run_.metrics));
  }
  return absl::OkStatus();
}

// Callbacks and logs see both as one evaluation.
absl::StatusOr<bool> Evaluator::Evaluate(bool validation, bool test, bool record) {
  const TrainerOptions& options = run_.options;
  const KeptGenerators generators(run_.session.device());
  const bool collect = test && !options.predictions.empty() && !options.dry_run;
  DDP_RETURN_IF_ERROR(run_.callbacks.Call(stops_, &Callback::OnEvaluationBegin));
  std::function<bool()> gives_up;
  if (stops_ != nullptr) gives_up = [this] { return stops_->IsUrgent(); };
  const c10::Device device = run_.session.device();
  const bool pins = options.pin_memory && device.is_cuda();
  const auto evaluate = [&](const data::AnyDataset& dataset, Predictions* predictions) {
    return trainer::Evaluate(run_.session, run_.task, dataset,
                             {.batch_size = options.eval_batch_size,
                              .num_workers = options.num_workers,
                              .prefetch_factor = options.prefetch_factor,
                              .pin_memory_device = pins ? device : c10::Device(c10::kCPU),
                              .stall = run_.session.stall()},
                             predictions, gives_up, options.seed);
  };
  std::optional<Evaluation> validated, tested;
  Predictions predictions;
  if (validation) {
    DDP_ASSIGN_OR_RETURN(validated, evaluate(*run_.validation, nullptr));
  }
  bool gave_up = validated && validated->examples == 0;
  if (test && !gave_up) {
    DDP_ASSIGN_OR_RETURN(tested, evaluate(*run_.test, collect ? &predictions : nullptr));
    gave_up = tested->examples == 0;
  }
  DDP_RETURN_IF_ERROR(generators.Restore());
  if (gave_up) {
    DDP_RETURN_IF_ERROR(
        run_.callbacks.Call(stops_, &Callback::OnEvaluationEnd, std::map<std::string, double>()));
    DDP_RETURN_IF_ERROR(stops_->Interrupt(run_.session));
    return false;
  }
  // Rank 0 writes alone, which may take long: the others wait here and not in a collective.
  absl::Status written;
  if (collect && run_.is_main()) written = WritePredictions(predictions, options.predictions);
  if (written.ok()) {
    written = run_.log->Evaluated(run_.position, validated ? &*validated : nullptr,
                                  tested ? &*tested : nullptr, record);
  }
  DDP_RETURN_IF_ERROR(run_.session.Agree(written));
  std::map<std::string, double> metrics;
  if (validated) {
    metrics = Metrics(*validated, kValidation);
    validation_ = std::move(validated);
    run_.position.validated_step = run_.position.step;
    has_validated_ = true;
    is_due_ = false;
    last_ = absl::Now();
  }
  if (tested) {
    metrics.merge(Metrics(*tested));
    test_ = std::move(tested);
    has_tested_ = true;
  }
  run_.metrics.insert(metrics.begin(), metrics.end());
  DDP_RETURN_IF_ERROR(run_.callbacks.Call(stops_, &Callback::OnEvaluationEnd, metrics));
  return true;
}

void Evaluator::Close() {
  if (agreement_) agreement_->Close();
}

}  // namespace ddp::trainer
