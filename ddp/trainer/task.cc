#include "ddp/trainer/task.h"

#include "ddp/amp/autocast.h"

namespace ddp::trainer {

at::Tensor ChannelsLast(const at::Tensor& tensor) {
  if (tensor.dim() != 4) return tensor;
  const at::Tensor ordered = tensor.contiguous(at::MemoryFormat::ChannelsLast);
  const int64_t c = tensor.size(1), h = tensor.size(2), w = tensor.size(3);
  return ordered.as_strided(tensor.sizes(), {c * h * w, 1, c * w, c});
}

bool HasMeanLoss(const Task& given) { return given.train_step == nullptr && given.phases.empty(); }

Task InSteps(Task task, const std::string& precision) {
  const at::ScalarType dtype = precision == "bf16"   ? at::kBFloat16
                               : precision == "fp16" ? at::kHalf
                                                     : at::kFloat;
  if (!HasMeanLoss(task)) {
    if (task.phases.empty()) task.phases.push_back({.train_step = task.train_step});
    if (task.eval_step == nullptr) task.eval_step = task.phases[0].train_step;
    if (dtype == at::kFloat) return task;
    std::vector<StepFunction*> steps = {&task.eval_step};
    for (Phase& phase : task.phases) steps.push_back(&phase.train_step);
    for (StepFunction* step : steps) {
      if (*step == nullptr) continue;
      *step = [step = std::move(*step), dtype](data::AnyBatch& batch, const StepContext& context) {
        const Autocast autocast(context.device.type(), dtype);
        return step(batch, context);
      };
    }
    return task;
  }
  const auto output_of = [forward = task.forward, channels_last = task.channels_last,
                          dtype](const data::Batch& batch) {
    TORCH_CHECK(batch.input.defined(), "the data set has given a batch without an input");
    const at::Tensor input = channels_last ? ChannelsLast(batch.input) : batch.input;
    if (dtype == at::kFloat) return forward(input);
    const Autocast autocast(input.device().type(), dtype);
    const at::Tensor output = forward(input);
    return at::isReducedFloatingType(output.scalar_type()) ? output.to(at::kFloat) : output;
  };
  task.counts_examples = true;
  const auto train_step = [output_of, loss = task.loss](data::AnyBatch& any, const StepContext&) {
    const auto& batch = any.Get<data::Batch>();
    return StepOutput{.loss = Mean(loss(output_of(batch), batch.target), any.size())};
  };
  task.phases = {{.train_step = train_step}};
  task.eval_step = [output_of, loss = task.loss, correct = task.correct](data::AnyBatch& any,
                                                                         const StepContext&) {
    const auto& batch = any.Get<data::Batch>();
    const at::Tensor output = output_of(batch);
    StepOutput result = {.loss = Mean(loss(output, batch.target), any.size()),
                         .predictions = data::AnyBatch(Outputs{output, batch.target})};
    if (correct) {
      result.metrics["accuracy"] = SumAndCount(correct(output, batch.target), batch.input.size(0));
    }
    return result;
  };
  return task;
}

}  // namespace ddp::trainer
