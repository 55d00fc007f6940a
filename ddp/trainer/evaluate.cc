#include "ddp/trainer/evaluate.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data/sampler.h"
#include "ddp/trainer/steps.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::trainer {
std::map<std::string, double> Metrics(const Evaluation& evaluation) {
  std::map<std::string, double> metrics = {{"test/loss", evaluation.loss}};
  for (const auto& [name, value] : evaluation.metrics) {
    metrics[absl::StrCat("test/", name)] = value;
  }
  return metrics;
}

std::string Describe(const Evaluation& evaluation) {
  std::string text;
  for (const auto& [name, value] : evaluation.metrics) {
    absl::StrAppendFormat(&text, "%s %.4f ", name, value);
  }
  return absl::StrCat(text, absl::StrFormat("loss %.4f", evaluation.loss));
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
                                    AnyCollector* collector,
                                    const std::function<bool()>& gives_up) {
  // Names of the trainer's, among those of the metrics. The latter counts ranks that give up.
  constexpr char kLoss[] = "loss", kExamples[] = "";
  const Task task = InSteps(given);
  DDP_ASSIGN_OR_RETURN(
      data::EvaluationSampler sampler,
      data::EvaluationSampler::Create(dataset.size(),
                                      {.num_replicas = session.size(), .rank = session.rank()}));
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::AnyLoader> loader,
                       data::AnyLoader::Create(dataset, sampler.Indices(), loader_options));
  const ModuleModes modes(*task.module);
  task.module->eval();
  const StepContext context = {.session = session, .device = session.device(), .training = false};
  std::map<std::string, Total> totals;
  const absl::Status status = CatchCollective("evaluating", [&]() -> absl::Status {
    const torch::NoGradGuard no_grad;
    while (true) {
      if (gives_up && gives_up()) {
        totals[kExamples].count = 1;
        break;
      }
      DDP_ASSIGN_OR_RETURN(std::optional<data::AnyBatch> batch, loader->Next());
      if (!batch) break;
      batch->To(context.device);
      StepOutput output = task.eval_step(*batch, context);
      if (!output.loss.defined() || output.metrics.contains(kLoss) ||
          output.metrics.contains(kExamples)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "task '", task.name,
            "': its evaluation step has given no loss, or a metric that is named '' or 'loss'"));
      }
      totals[kLoss].Add(output.loss);
      totals[kExamples].sum += static_cast<double>(batch->indices().size());
      for (const auto& [name, metric] : output.metrics) totals[name].Add(metric);
      if (collector != nullptr) {
        DDP_RETURN_IF_ERROR(collector->Add(output.predictions, batch->indices()));
      }
    }
    DDP_ASSIGN_OR_RETURN(totals, AddUp(session.process_group(), totals));
    return absl::OkStatus();
  });
  modes.Restore();
  DDP_RETURN_IF_ERROR(status);
  if (totals[kExamples].count > 0) return Evaluation{};

  Evaluation result;
  result.examples = static_cast<int64_t>(totals[kExamples].sum);
  result.loss = totals[kLoss].mean();
  for (const auto& [name, total] : totals) {
    if (name != kLoss && name != kExamples) result.metrics[name] = total.mean();
  }
  if (const auto accuracy = result.metrics.find("accuracy"); accuracy != result.metrics.end()) {
    result.accuracy = accuracy->second;
  }
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
