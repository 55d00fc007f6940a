#include "ddp/trainer/evaluate.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data/sampler.h"
#include "ddp/trainer/batch.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::trainer {

absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::Dataset& dataset,
                                    const data::LoaderOptions& loader_options) {
  DDP_ASSIGN_OR_RETURN(
      data::EvaluationSampler sampler,
      data::EvaluationSampler::Create(dataset.size(),
                                      {.num_replicas = session.size(), .rank = session.rank()}));
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                       data::Loader::Create(dataset, sampler.Indices(), loader_options));
  const bool was_training = task.module->is_training();
  task.module->eval();
  at::Tensor sums;
  absl::Status status = CatchCollective("evaluating", [&]() -> absl::Status {
    torch::NoGradGuard no_grad;
    double loss = 0;
    int64_t correct = 0, examples = 0;
    while (true) {
      DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, loader->Next());
      if (!batch) break;
      const int64_t n = batch->input.size(0);
      const data::Batch there = ToDevice(*batch, session.device(), task.channels_last);
      const at::Tensor output = task.forward(there.input);
      loss += task.loss(output, there.target).item<double>() * static_cast<double>(n);
      if (task.correct) correct += task.correct(output, there.target).item<int64_t>();
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
  task.module->train(was_training);
  DDP_RETURN_IF_ERROR(status);

  const at::Tensor total = sums.cpu();
  const double* values = total.data_ptr<double>();
  Evaluation result;
  result.examples = static_cast<int64_t>(values[2]);
  result.loss = values[0] / values[2];
  result.accuracy = values[1] / values[2];
  return result;
}

}  // namespace ddp::trainer
