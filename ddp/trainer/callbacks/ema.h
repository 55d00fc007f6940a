// An exponential moving average of a run's weights, which often generalises better than the weights
// of the last step.
//
//   options.ema = {.decay = 0.999, .eval = true};        // Train makes it; or, to keep it:
//   auto ema = std::make_shared<Ema>(EmaOptions{.decay = 0.999});
//   options.callbacks.push_back(ema);
//   …                                                     // Train
//   DDP_RETURN_IF_ERROR(ema->CopyTo(*net));              // the weights are the average
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/model_tensors.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/callbacks/options.h"

namespace ddp::trainer {

// The average after each step is d · average + (1 - d) · weights, for all parameters that are
// trained; d is options.decay, or less in the beginning (EmaOptions::warmup). It begins with the
// weights before the first step, of a run or of a resumed one whose checkpoint has no average.
// Frozen parameters and buffers, such as BatchNorm's statistics, are the model's own. The average
// of fp16 and bf16 parameters is in fp32: what a step adds would be rounded to nothing in 16 bits.
//
// With options.eval the module has the average during each evaluation, and its weights back
// afterwards, bit for bit. Checkpoints have it beside the weights, as {"weights": {name: tensor},
// "updates": n} under "ema". The average is the same on all ranks, as the weights are, whatever the
// sharding of the optimizer. Memory: one copy of the parameters, on their device; during an
// evaluation one more of the largest one, and of all that are fp16 or bf16.
class Ema final : public Callback, public checkpoint::Stateful {
 public:
  static constexpr char kName[] = "ema";

  explicit Ema(const EmaOptions& options) : options_(options) {}

  // Copies the average to the parameters of `module`, by name, in their dtypes. FailedPrecondition
  // before the run has begun; InvalidArgument if a parameter is missing or has another shape. Not
  // collective.
  absl::Status CopyTo(torch::nn::Module& module) const;
  // The average has the parameters' names. It changes with each step, and has other values during
  // an evaluation with options.eval.
  const NamedTensors& average() const { return average_; }

  std::string name() const override { return kName; }
  checkpoint::Stateful* stateful() override { return this; }
  absl::Status OnSetUp(CallbackContext& run) override;
  absl::Status OnStart(CallbackContext& run) override;
  absl::Status OnStepEnd(CallbackContext& run, const at::Tensor& loss) override;
  absl::Status OnEvaluationBegin(CallbackContext& run) override;
  absl::Status OnEvaluationEnd(CallbackContext& run,
                               const std::map<std::string, double>& metrics) override;
  void OnException(CallbackContext& run, const absl::Status& error) override;

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  void Swap();

  const EmaOptions options_;
  int64_t updates_ = 0;
  bool is_loaded_ = false;
  bool is_swapped_ = false;  // the module has the average
  NamedTensors average_;     // while swapped, those with their parameters' dtype have the weights
  std::vector<at::Tensor> weights_;  // the module's parameters, in the same order
  std::vector<at::Tensor> kept_;     // while swapped, the weights where average_ has another dtype
};

}  // namespace ddp::trainer
