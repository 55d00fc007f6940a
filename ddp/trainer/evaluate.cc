#include "ddp/trainer/evaluate.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data/sampler.h"
#include "ddp/gather/gather_for_metrics.h"
#include "ddp/trainer/batch.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::trainer {
namespace {

// The predictions of this rank, batch by batch.
struct Collected {
  std::vector<at::Tensor> targets, predictions;

  absl::Status Add(const at::Tensor& output, const at::Tensor& target) {
    if (output.dim() != 2 || !target.defined() || target.dim() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "predictions are the largest of outputs [n, classes] with targets [n], but this task has "
          "outputs of ",
          output.dim(), " dimensions and ",
          target.defined() ? absl::StrCat("targets of ", target.dim()) : "no targets"));
    }
    targets.push_back(target.cpu());
    predictions.push_back(output.argmax(1).cpu());
    return absl::OkStatus();
  }
};

absl::StatusOr<Predictions> GatherPredictions(const session::Session& session,
                                              const std::vector<int64_t>& indices,
                                              const Collected& mine) {
  using Columns = std::pair<at::Tensor, at::Tensor>;
  Columns columns;
  if (!indices.empty()) columns = {at::cat(mine.targets), at::cat(mine.predictions)};
  DDP_ASSIGN_OR_RETURN(Columns all, GatherForMetrics(session.process_group(), indices, columns));
  return Predictions{std::move(all.first), std::move(all.second)};
}

}  // namespace

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

absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::Dataset& dataset,
                                    const data::LoaderOptions& loader_options,
                                    Predictions* predictions) {
  DDP_ASSIGN_OR_RETURN(
      data::EvaluationSampler sampler,
      data::EvaluationSampler::Create(dataset.size(),
                                      {.num_replicas = session.size(), .rank = session.rank()}));
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                       data::Loader::Create(dataset, sampler.Indices(), loader_options));
  const ModuleModes modes(*task.module);
  task.module->eval();
  at::Tensor sums;
  Collected collected;
  absl::Status status = CatchCollective("evaluating", [&]() -> absl::Status {
    torch::NoGradGuard no_grad;
    double loss = 0;
    int64_t correct = 0, examples = 0;
    while (true) {
      DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader->Next());
      if (!batch) break;
      const data::Batch there = ToDevice(*batch, session.device(), task.channels_last);
      const int64_t n = there.input.size(0);
      const at::Tensor output = task.forward(there.input);
      loss += task.loss(output, there.target).item<double>() * static_cast<double>(n);
      if (task.correct) correct += task.correct(output, there.target).item<int64_t>();
      if (predictions != nullptr) DDP_RETURN_IF_ERROR(collected.Add(output, there.target));
      examples += n;
    }
    // Doubles hold counts exactly up to 2^53.
    sums =
        at::tensor({loss, static_cast<double>(correct), static_cast<double>(examples)}, at::kDouble)
            .to(session.device());
    if (session.process_group()) {
      std::vector<at::Tensor> tensors = {sums};
      session.process_group()->allreduce(tensors)->wait();
      sums = tensors[0];
    }
    return absl::OkStatus();
  });
  modes.Restore();
  DDP_RETURN_IF_ERROR(status);
  if (predictions != nullptr) {
    DDP_ASSIGN_OR_RETURN(*predictions, GatherPredictions(session, sampler.Indices(), collected));
  }

  const at::Tensor total = sums.cpu();
  const double* values = total.data_ptr<double>();
  Evaluation result;
  result.examples = static_cast<int64_t>(values[2]);
  result.loss = values[0] / values[2];
  result.accuracy = values[1] / values[2];
  return result;
}

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
