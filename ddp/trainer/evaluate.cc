#include "ddp/trainer/evaluate.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data/sampler.h"
#include "ddp/metrics/classification.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::trainer {
namespace {

// Names of the trainer's, among those of the metrics. The second counts examples, and ranks that
// give up; the third is the number of classes of the outputs.
constexpr char kLoss[] = "loss", kExamples[] = "", kClasses[] = " ";

// What the trainer itself, and its monitors, record of training steps as "train/NAME".
constexpr absl::string_view kOfTraining[] = {kLoss,
                                             "lr",
                                             "gradient_norm",
                                             "loss_scale",
                                             "comm_bytes",
                                             "gather_bytes",
                                             "examples_per_second",
                                             "data_wait",
                                             "pss_mib",
                                             "pss_mib_max",
                                             "device_mib",
                                             "device_mib_max",
                                             "device_peak_mib"};

// The metrics of a task in one evaluation, on one rank.
class TaskMetrics {
 public:
  explicit TaskMetrics(const Task& task) : task_(task) {}

  // May throw.
  absl::Status Make() {
    if (task_.metrics) all_ = task_.metrics();
    if (std::find(all_.begin(), all_.end(), nullptr) == all_.end()) return absl::OkStatus();
    return Refuse("one of its metrics is null");
  }

  // StepContext::Update. What goes wrong is said by EndBatch.
  void Update(absl::string_view name, const at::Tensor& output, const at::Tensor& target) {
    if (!updated_.ok()) return;
    std::vector<std::string> names;
    for (const auto& metric : all_) {
      if (metric->name() == name) {
        fed_.insert(metric->name());
        updated_ = metric->Update(output, target);
        return;
      }
      names.push_back(metric->name());
    }
    updated_ = Refuse("its evaluation step updates a metric '", name, "', but Task::metrics has ",
                      names.empty() ? "none" : absl::StrJoin(names, ", "));
  }

  // After each step: the metrics that it has not updated itself get its predictions.
  absl::Status EndBatch(data::AnyBatch& predictions) {
    DDP_RETURN_IF_ERROR(updated_);
    const bool has_outputs = predictions.Is<Outputs>();
    if (has_outputs) {
      const at::Tensor& output = predictions.Get<Outputs>().output;
      DDP_RETURN_IF_ERROR(AddNamed(output.dim() < 2 ? 1 : output.size(1)));
    } else if (!task_.metric_names.empty()) {
      return NeedsOutputs(task_.metric_names[0]);
    }
    for (const auto& metric : all_) {
      if (fed_.contains(metric->name())) continue;
      if (!has_outputs) return NeedsOutputs(metric->name());
      const auto& outputs = predictions.Get<Outputs>();
      DDP_RETURN_IF_ERROR(metric->Update(outputs.output, outputs.target));
    }
    fed_.clear();
    return absl::OkStatus();
  }

  // Of the outputs; 0: not known, on a rank without examples.
  int64_t classes() const { return classes_; }

  // Collective. `classes`: of some rank.
  absl::Status Reduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t classes,
                      Evaluation& result) {
    if (classes > 0) DDP_RETURN_IF_ERROR(AddNamed(classes));
    if (all_.empty()) return absl::OkStatus();
    std::vector<metrics::Metric*> pointers;
    for (const auto& metric : all_) pointers.push_back(metric.get());
    DDP_ASSIGN_OR_RETURN(const auto values, metrics::ReduceMetrics(group, pointers));
    for (const auto& [name, value] : values) {
      if (name != kLoss && result.metrics.emplace(name, value).second) continue;
      return Refuse("both its evaluation step and its metrics have a value '", name,
                    "': give one of them another name");
    }
    for (const auto& metric : all_) {
      const std::string table = metric->Table();
      absl::StrAppend(&result.table, table, table.empty() || table.back() == '\n' ? "" : "\n");
    }
    return absl::OkStatus();
  }

 private:
  template <typename... What>
  absl::Status Refuse(const What&... what) const {
    return absl::InvalidArgumentError(absl::StrCat("task '", task_.name, "': ", what...));
  }

  absl::Status NeedsOutputs(absl::string_view metric) const {
    return Refuse("metric '", metric,
                  "' has got nothing of a batch: the evaluation step must give predictions of type "
                  "Outputs, or update the metric itself (StepContext::Update)");
  }

  // The metrics by name, once.
  absl::Status AddNamed(int64_t classes) {
    if (task_.metric_names.empty() || std::exchange(classes_, classes) != 0) {
      return absl::OkStatus();
    }
    for (const std::string& name : task_.metric_names) {
      auto metric = metrics::MakeMetric(name, classes);
      if (!metric.ok()) return Refuse(metric.status().message());
      all_.push_back(*std::move(metric));
    }
    return absl::OkStatus();
  }

  const Task& task_;
  std::vector<std::shared_ptr<metrics::Metric>> all_;
  int64_t classes_ = 0;
  std::set<std::string> fed_;  // by the step, with the present batch
  absl::Status updated_;
};

}  // namespace

std::map<std::string, double> Metrics(const Evaluation& evaluation, absl::string_view prefix) {
  std::map<std::string, double> metrics = {{absl::StrCat(prefix, kLoss), evaluation.loss}};
  for (const auto& [name, value] : evaluation.metrics) {
    metrics[absl::StrCat(prefix, name)] = value;
  }
  return metrics;
}

absl::Status CheckMetricNames(const Task& task, const std::map<std::string, SumAndCount>& metrics,
                              std::optional<size_t> phase) {
  for (const auto& [name, metric] : metrics) {
    absl::string_view own = name;
    // The names of the other phases' values end with those of the phases.
    for (size_t i = 1; phase == 0 && i < task.phases.size(); ++i) {
      if (absl::ConsumeSuffix(&own, absl::StrCat(".", task.phases[i].name))) break;
    }
    const bool is_blank = name.find_first_not_of(' ') == std::string::npos;
    const bool is_own = phase ? std::find(std::begin(kOfTraining), std::end(kOfTraining), own) !=
                                    std::end(kOfTraining)
                              : own == kLoss;
    if (!is_blank && !is_own) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "task '", task.name, "': its ", phase ? "training" : "evaluation", " step gives a metric '",
        name, "', which is ", is_own ? "the name of a value of the trainer's own" : "no name",
        ": give it another"));
  }
  return absl::OkStatus();
}

std::string Describe(const Evaluation& evaluation) {
  std::string text;
  const auto add = [&text](const std::string& name, double value) {
    // The sign of a NaN says nothing.
    absl::StrAppendFormat(&text, "%s %.4f", name, std::isnan(value) ? std::abs(value) : value);
  };
  for (const auto& [name, value] : evaluation.metrics) {
    add(name, value);
    text += ' ';
  }
  add("loss", evaluation.loss);
  return text;
}

absl::StatusOr<std::map<std::string, Total>> AddUp(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::map<std::string, Total>& mine) {
  DDP_ASSIGN_OR_RETURN(const auto all, AllGather(group, mine));
  std::map<std::string, Total> totals;
  for (const auto& theirs : all) {
    for (const auto& [name, total] : theirs) {
      totals[name].sum += total.sum;
      totals[name].count += total.count;
    }
  }
  return totals;
}

ModuleModes::ModuleModes(torch::nn::Module& module) {
  for (const auto& each : module.modules()) modes_.emplace_back(each, each->is_training());
}

bool ModuleModes::any_training() const {
  return std::any_of(modes_.begin(), modes_.end(), [](const auto& mode) { return mode.second; });
}

void ModuleModes::Restore() const {
  for (const auto& [module, training] : modes_) {
    if (module->is_training() != training) module->train(training);
  }
}

void ModuleModes::RestoreEval() const {
  // What train() has left in evaluation mode stays in it.
  ModuleModes wanted = *this;
  for (auto& [module, training] : wanted.modes_) training = training && module->is_training();
  wanted.Restore();
}

namespace evaluate_internal {

absl::StatusOr<Predictions> Classes(const Outputs& outputs) {
  const at::Tensor& target = outputs.target;
  if (outputs.output.dim() != 2 || !target.defined() || target.dim() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "predictions are the largest of outputs [n, classes] with targets [n], but this task has "
        "outputs of ",
        outputs.output.dim(), " dimensions and ",
        target.defined() ? absl::StrCat("targets of ", target.dim()) : "no targets"));
  }
  return Predictions{target, outputs.output.argmax(1)};
}

absl::Status OtherPredictions(const data::AnyBatch& given, const std::type_info& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("the evaluation step of this task gives ",
                   given.has_value() ? absl::StrCat("predictions of type ", given.type_name())
                                     : "no predictions",
                   ", but those that are asked for are of type ", c10::demangle(wanted.name()),
                   ": see StepOutput::predictions (ddp/trainer/task.h)"));
}

absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& given,
                                    const data::AnyDataset& dataset,
                                    const data::LoaderOptions& loader_options,
                                    AnyCollector* collector, const std::function<bool()>& gives_up,
                                    int64_t seed) {
  const Task task = InSteps(given);
  DDP_ASSIGN_OR_RETURN(
      const data::EvaluationSampler sampler,
      data::EvaluationSampler::Create(
          dataset.size(), {.num_replicas = session.size(), .rank = session.rank(), .seed = seed}));
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::AnyLoader> loader,
                       data::AnyLoader::Create(dataset, loader_options));
  DDP_RETURN_IF_ERROR(loader->Begin(sampler.AsShare()));
  const ModuleModes modes(*task.module);
  task.module->eval();
  TaskMetrics metrics(task);
  const StepContext context = {
      .session = session,
      .device = session.device(),
      .training = false,
      .update = [&metrics](absl::string_view name, const at::Tensor& output,
                           const at::Tensor& target) { metrics.Update(name, output, target); }};
  std::map<std::string, Total> totals;
  Evaluation result;
  const absl::Status status = CatchCollective("evaluating", [&]() -> absl::Status {
    const torch::NoGradGuard no_grad;
    DDP_RETURN_IF_ERROR(metrics.Make());
    while (true) {
      if (gives_up && gives_up()) {
        totals[kExamples].count = 1;
        break;
      }
      DDP_ASSIGN_OR_RETURN(std::optional<data::AnyBatch> batch, loader->Next());
      if (!batch) break;
      batch->To(context.device);
      StepOutput output = task.eval_step(*batch, context);
      if (!output.loss.defined()) {
        return absl::InvalidArgumentError(
            absl::StrCat("task '", task.name, "': its evaluation step has given no loss"));
      }
      DDP_RETURN_IF_ERROR(CheckMetricNames(task, output.metrics));
      totals[kLoss].Add(output.loss);
      totals[kExamples].sum += static_cast<double>(batch->indices().size());
      for (const auto& [name, metric] : output.metrics) totals[name].Add(metric);
      DDP_RETURN_IF_ERROR(metrics.EndBatch(output.predictions));
      if (collector != nullptr) {
        DDP_RETURN_IF_ERROR(collector->Add(output.predictions, batch->indices()));
      }
    }
    if (metrics.classes() > 0) {
      totals[kClasses] = {.sum = static_cast<double>(metrics.classes()), .count = 1};
    }
    DDP_ASSIGN_OR_RETURN(totals, AddUp(session.process_group(), totals));
    if (totals[kExamples].count > 0) return absl::OkStatus();  // given up
    result.examples = static_cast<int64_t>(totals[kExamples].sum);
    result.loss = totals[kLoss].mean();
    for (const auto& [name, total] : totals) {
      if (name != kLoss && name != kExamples && name != kClasses) {
        result.metrics[name] = total.mean();
      }
    }
    const auto classes = totals.find(kClasses);
    return metrics.Reduce(
        session.process_group(),
        classes == totals.end() ? 0 : static_cast<int64_t>(classes->second.mean()), result);
  });
  modes.Restore();
  DDP_RETURN_IF_ERROR(status);
  return result;
}

}  // namespace evaluate_internal

absl::Status WritePredictions(const Predictions& predictions, const std::string& path) {
  const auto target = predictions.target.to(at::kLong).contiguous();
  const auto prediction = predictions.prediction.to(at::kLong).contiguous();
  std::string text;
  for (int64_t i = 0; i < target.numel(); ++i) {
    absl::StrAppend(&text, "{\"index\": ", i, ", \"target\": ", target.const_data_ptr<int64_t>()[i],
                    ", \"prediction\": ", prediction.const_data_ptr<int64_t>()[i], "}\n");
  }
  return WriteFileAtomically(path, text);
}

}  // namespace ddp::trainer
