// The task of the trainer: a module, and what a step computes with it from a batch.
//
//   auto net = std::make_shared<Net>();  // forward(Tensor) -> Tensor of logits [n, classes]
//   Task task = Classification("my_net", net);
//
//   // Any module, any batch (ddp/tree/tree.h), any loss:
//   Task task = TaskOf<Sentences>("lm", net, [net](Sentences& batch, const StepContext&) {
//     at::Tensor loss = …;  // [n, length], of each token
//     return StepOutput{.loss = SumAndCount((loss * batch.mask).sum(), batch.mask.sum())};
//   });
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "c10/core/Device.h"
#include "ddp/data/batch.h"
#include "ddp/ddp.h"
#include "ddp/metrics/metric.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/schedule.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/module.h"

namespace ddp::session {
class Session;
}

namespace ddp::trainer {

// A sum, and the number of things (examples, tokens, pixels, labels that are not masked) that it is
// over. The trainer adds both up over batches and ranks and divides once, in the end: an average of
// averages would weigh things by the sizes of their batches. A value.
class SumAndCount {
 public:
  // The sum of nothing.
  SumAndCount() = default;
  // `sum`: one element, of any floating-point or integer dtype. `count` >= 0; a tensor is read from
  // its device, which waits for it.
  template <typename N>
  requires std::is_arithmetic_v<N> SumAndCount(const at::Tensor& sum, N count)
      : value_(ToFloat(sum)), count_(static_cast<double>(count)) {}
  SumAndCount(const at::Tensor& sum, const at::Tensor& count)
      : SumAndCount(sum, count.item<double>()) {}

  // Works as for a sum, without rounding `mean` by a multiplication.
  static SumAndCount OfMean(const at::Tensor& mean, double count) {
    SumAndCount self(mean, count);
    self.is_mean_ = true;
    return self;
  }

  bool defined() const { return value_.defined(); }
  double count() const { return count_; }
  // The sum, or the mean if that is what it was made of.
  const at::Tensor& value() const { return value_; }
  // The sum, in double precision; waits for the device. 0 for a count of 0.
  double sum() const {
    if (count_ == 0) return 0;
    const auto value = value_.item<double>();
    return is_mean_ ? value * count_ : value;
  }
  // The same, not 0, as a tensor: detached, on the device.
  at::Tensor double_sum() const {
    const at::Tensor value = value_.detach().to(at::kDouble);
    return is_mean_ ? value * count_ : value;
  }
  // The mean. Detached; on the device.
  at::Tensor mean() const {
    return is_mean_ || count_ == 1 ? value_.detach() : value_.detach() / count_;
  }
  // The sum times factor / divisor.
  at::Tensor Scaled(double factor, double divisor) const {
    const double scale = (is_mean_ ? factor * count_ : factor) / divisor;
    return scale == 1 ? value_ : value_ * scale;
  }

 private:
  // A 16-bit sum has too few bits to add up.
  static at::Tensor ToFloat(const at::Tensor& value) {
    return at::isReducedFloatingType(value.scalar_type()) ? value.to(at::kFloat) : value;
  }

  at::Tensor value_;
  double count_ = 0;
  bool is_mean_ = false;
};

// The sum and count of a mean over n things.
template <typename N>
requires std::is_arithmetic_v<N> SumAndCount Mean(const at::Tensor& mean, N n) {
  return SumAndCount::OfMean(mean, static_cast<double>(n));
}

// The facts of the run that a step knows.
struct StepContext {
  const session::Session& session;
  c10::Device device;    // that of the batch
  bool training = true;  // false: an evaluation, without gradients
  int64_t epoch = 0;     // complete epochs; 0 in an evaluation
  int64_t step = 0;      // optimizer steps before this one; 0 in an evaluation

  // Adds a batch to one of Task::metrics in an evaluation, instead of StepOutput::predictions; in
  // training nothing happens. An error ends the evaluation: InvalidArgument if no metric has this
  // name, and those of Metric::Update.
  void Update(absl::string_view metric, const at::Tensor& output,
              const at::Tensor& target = {}) const {
    if (update) update(metric, output, target);
  }
  // Set by Evaluate.
  std::function<void(absl::string_view, const at::Tensor&, const at::Tensor&)> update = nullptr;
};

// The values that a step computes from a batch.
struct StepOutput {
  // Its sum requires a gradient in training, also where the count is 0: the gradient of the step is
  // that of (sum of the sums) / (sum of the counts), over the batches and ranks of the step.
  SumAndCount loss;
  // Further values by name, in logs "train/NAME" and "test/NAME"; without gradients. Names of
  // values that the trainer records itself, such as "loss" or "lr", are an error of the first step.
  std::map<std::string, SumAndCount> metrics = {};
  // It is any tree with one row or element per example, in evaluation
  // (ddp/gather/gather_for_metrics.h). Optional. With Outputs, TrainerOptions::predictions writes
  // the class of each example.
  data::AnyBatch predictions = {};
};

// The predictions of a task with one output; outputs [n, classes] and targets [n] are those of a
// classifier.
struct Outputs {
  at::Tensor output;
  at::Tensor target;
};

constexpr auto FieldsOf(const Outputs&) {
  return Fields(Field("output", &Outputs::output), Field("target", &Outputs::target));
}

using StepFunction = std::function<StepOutput(data::AnyBatch& batch, const StepContext& context)>;
using MetricsMaker = std::function<std::vector<std::shared_ptr<metrics::Metric>>()>;

// A part of each training step that has parameters, an optimizer and a loss of its own, as that of
// a GAN's discriminator. A plain value.
struct Phase {
  // The name in logs and checkpoints: letters, digits, '_'.
  std::string name = "";
  // A regular expression of ECMAScript: its parameters are those whose whole names match. Only they
  // require gradients in the phase.
  std::string parameters = "";
  // It works as Task::train_step, on the same batches as the other phases, after their optimizers'
  // steps.
  StepFunction train_step = nullptr;
  // These are as in TrainerOptions, whose are used if neither is set.
  std::optional<OptimizerOptions> optimizer = std::nullopt;
  OptimizerMaker make_optimizer = nullptr;
  // Null: that of TrainerOptions.
  std::optional<ScheduleOptions> schedule = std::nullopt;
};

// A plain value. Only the training thread calls the functions. It has either phases, or a
// train_step, or `forward` and `loss`, of which the trainer makes the steps.
struct Task {
  // Saved in checkpoints; loading a checkpoint with another name is an error.
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  // The wrapper of a module that is wrapped already. Null: Train wraps the module, by
  // TrainerOptions::model_wrapper.
  std::shared_ptr<ModelWrapper> parallel = nullptr;

  // Runs the module on the input of a batch, which is a data::Batch.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  // Mean loss over the batch: a scalar that requires a gradient. It counts as often as the batch
  // has examples.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss;
  // Number of correct predictions in the batch: an integer scalar, for the metric "accuracy". Null:
  // there is no such metric.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> correct;

  // Convert 4-dimensional parameters, and inputs for `forward`, to channels-last order, which makes
  // convolutions on CPUs about 1.6 times as fast. Parameters of a module that is wrapped already
  // must be in it.
  bool channels_last = false;

  // Computes the loss of a batch, which is on the session's device; the trainer calls backward. It
  // may run the module several times, or parts of it, also without the loss depending on all. It
  // runs under autocast as a whole, if TrainerOptions::precision says so. Each parameter must take
  // part in the loss, or data_parallel.find_unused_parameters be set. May throw.
  StepFunction train_step = nullptr;
  // The same in evaluation mode, without gradients. Not collective: ranks may have different
  // numbers of batches. Null: train_step, of the first phase.
  StepFunction eval_step = nullptr;
  // Metrics of an evaluation that are no sums of its steps (ddp/metrics), made anew for each. Each
  // is updated with output and target of the steps' predictions, which must be Outputs, unless the
  // eval_step does it itself, for each batch: StepContext::Update. The same on all ranks.
  MetricsMaker metrics = nullptr;
  // Further ones by name: those of MakeMetric (ddp/metrics/classification.h), for predictions that
  // are Outputs, with the classes in dimension 1 of the output. TrainerOptions::metrics adds to it.
  std::vector<std::string> metric_names = {};
  // Promise that the loss's count of train_step is the number of examples of the batch
  // (AnyBatch::size): the ranks then need no message to know the sum of their counts. Checked.
  bool counts_examples = false;

  // Not empty: each training step runs these in order, in the place of train_step. Accumulation,
  // clipping, scaler and ZeRO hold per phase. Each trainable parameter is in one phase.
  std::vector<Phase> phases = {};
};

// A step on batches of type B; throws if a batch is of another type.
template <Tree B>
StepFunction StepOf(
    std::function<StepOutput(std::type_identity_t<B>& batch, const StepContext& context)> step) {
  if (step == nullptr) return nullptr;
  return [step = std::move(step)](data::AnyBatch& batch, const StepContext& context) {
    return step(batch.Get<B>(), context);
  };
}

// A task on batches of type B.
template <Tree B>
Task TaskOf(std::string name, std::shared_ptr<torch::nn::Module> module,
            std::function<StepOutput(std::type_identity_t<B>& batch, const StepContext& context)>
                train_step,
            std::function<StepOutput(std::type_identity_t<B>& batch, const StepContext& context)>
                eval_step = nullptr) {
  Task task;
  task.name = std::move(name);
  task.module = std::move(module);
  task.train_step = StepOf<B>(std::move(train_step));
  task.eval_step = StepOf<B>(std::move(eval_step));
  return task;
}

// Cross entropy over logits [n, classes] and int64 targets [n].
template <typename M>
Task Classification(std::string name, std::shared_ptr<M> module, bool channels_last = false) {
  Task task;
  task.name = std::move(name);
  task.module = module;
  task.forward = [module](const at::Tensor& input) { return module->forward(input); };
  task.loss = [](const at::Tensor& output, const at::Tensor& target) {
    TORCH_CHECK(target.defined(),
                "the data set has given a batch without targets, which a classification needs");
    return torch::nn::functional::cross_entropy(output, target);
  };
  task.correct = [](const at::Tensor& output, const at::Tensor& target) {
    return output.argmax(1).eq(target).sum();
  };
  task.channels_last = channels_last;
  return task;
}

// The same for a module that is wrapped already; it must be on the session's device.
template <typename M>
Task Classification(std::string name, const std::shared_ptr<DistributedDataParallel<M>>& wrapped) {
  Task task = Classification(std::move(name), wrapped->module());
  task.parallel = wrapped->shared_parallel();
  return task;
}

// The task with an eval_step and at least one phase, which are all that the trainer calls of it:
//
//   const Task task = InSteps(given, "bf16");
//   StepOutput output = task.phases[0].train_step(batch, context);  // under autocast
//
// `precision`: "fp32", "bf16" or "fp16". Of `forward` and `loss`, only the former runs under
// autocast, and its floating-point result is float32, for the latter; a train_step runs under it as
// a whole.
Task InSteps(Task task, const std::string& precision = "fp32");

// Whether the sums of the loss are those of means over a batch's examples: of `forward` and `loss`.
bool HasMeanLoss(const Task& given);

// `tensor` [n, c, h, w] in channels-last order, always with channels-last strides; tensors of other
// dimensions are returned unchanged. With one channel both orders have the same bytes, so torch's
// contiguous() keeps the default strides, and the following convolutions would run in the slow
// order.
at::Tensor ChannelsLast(const at::Tensor& tensor);

}  // namespace ddp::trainer
