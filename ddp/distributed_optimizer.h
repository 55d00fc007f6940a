// The optimizer of a training step, whatever it is: one that every rank has whole (MakeReplicated),
// or a sharded one (ddp/zero/sharded_optimizer.h); with a gradient scaler inside.
//
//   std::unique_ptr<DistributedOptimizer> optimizer = MakeReplicated(
//       std::make_unique<torch::optim::SGD>(parameters, 0.1), parallel, GradScaler::Disabled());
//   optimizer->WaitForParameters();           // of the last step, before forward
//   optimizer->scale(loss).backward();
//   optimizer->unscale_();
//   optimizer->clip_grad_norm_(1.0);
//   optimizer->step();
//   optimizer->zero_grad();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/stateful.h"
#include "ddp/amp/grad_scaler.h"
#include "optim/kind.h"
#include "optim/state_dict.h"
#include "torch/optim/optimizer.h"

namespace ddp {

namespace checkpoint {
struct ReadRequest;
}

class Joinable;
class ModelWrapper;

// Thread-compatible. All ranks make the same calls, which may be collective. Functions with a name
// of PyTorch's throw as these do: c10::Error, also of a failed collective.
class DistributedOptimizer : public checkpoint::Stateful {
 public:
  // `scaler`: not null; GradScaler::Disabled() if gradients are not scaled.
  explicit DistributedOptimizer(std::unique_ptr<GradScaler> scaler) : scaler_(std::move(scaler)) {}

  // The loss from which backward starts.
  at::Tensor scale(const at::Tensor& loss) const {
    return scaler_->is_enabled() ? scaler_->scale(loss) : loss;
  }
  // loss.backward(), to `inputs` alone if they are given: parameters of this optimizer. Of an
  // optimizer that reduces gradients itself (zero.stage=2), with find_unused_parameters, it takes
  // part in the reduction of the other ranks whatever `loss` reaches.
  virtual void Backward(const at::Tensor& loss,
                        std::optional<at::TensorList> inputs = std::nullopt) {
    loss.backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/false, inputs);
  }
  // Divides the gradients by the scale of the loss, and multiplies them by `factor`. Call it once
  // before each step.
  void unscale_(double factor = 1) {
    if (scaler_->is_enabled()) {
      scaler_->unscale_(optimizer(), factor);
    } else if (factor != 1) {
      MultiplyGradients(factor);
    }
  }
  // The norm of all gradients before they are scaled so that it is at most `max_norm`. `norm_type`:
  // the p of the p-norm; infinity for the maximum norm (ddp/clip_grad.h).
  virtual double clip_grad_norm_(double max_norm, double norm_type = 2.0) = 0;
  // Limits each element of the gradients to [-clip_value, clip_value].
  virtual void clip_grad_value_(double clip_value) = 0;
  // Takes a step, unless a gradient is infinite under a scaler, and adapts the scale.
  void step() {
    if (scaler_->is_enabled()) {
      scaler_->step(optimizer());
      scaler_->update();
    } else {
      optimizer().step();
    }
  }
  // Resets the gradients to undefined.
  virtual void zero_grad() = 0;

  // Waits until this rank has all parameters of the last step: before they are read or written.
  virtual void WaitForParameters() {}

  // Bytes that this rank has handed to collectives so far (ddp/comm_bytes.h), without those of the
  // model's wrapper. Not collective.
  struct CommBytes {
    int64_t gradients = 0;
    std::optional<int64_t> parameters = std::nullopt;  // nullopt: of a kind that sends none
  };
  virtual CommBytes comm_bytes() const { return {}; }

  // Its parameter groups are those of the whole model.
  virtual torch::optim::Optimizer& optimizer() = 0;
  const torch::optim::Optimizer& optimizer() const {
    return const_cast<DistributedOptimizer*>(this)->optimizer();
  }
  GradScaler& scaler() { return *scaler_; }

  // If it reduces gradients itself, as ZeroRedundancyOptimizer of stage 2 does: the order in which
  // it does so (zero_redundancy_optimizer.h).
  virtual std::vector<int64_t> bucket_order() const { return {}; }
  virtual void RestoreBucketOrder(const std::vector<int64_t>& /*order*/) {}

  // Its part in a Join for uneven batches (ddp/join.h); null if it needs none.
  virtual Joinable* joinable() { return nullptr; }
  // A line for a log; empty if there is nothing to say.
  virtual std::string Describe() const { return ""; }

  // Names of the parameters, one for each, by number through all groups: a load then finds a state
  // that has names by these. `saved`: state_dict has them, too, in the place of numbers. Names that
  // cannot be keys, with a slash, are not used.
  void NameParameters(optim::ParameterNames names, bool saved);

  // The element type of the tensors in the state of a parameter.
  virtual at::ScalarType StateDtype(const at::Tensor& parameter) const {
    return parameter.scalar_type();
  }

  // Adds to `request` what this rank needs of a state_dict that a checkpoint has under `key`, if it
  // does not need the whole. Not collective.
  virtual void RequestState(const std::string& key, checkpoint::ReadRequest& request) const;

  // The state of all parameters as PyTorch's {state, param_groups} (optim/state_dict.h), without
  // the scaler's. A load keeps the present options (momentum, weight decay) and says which differ:
  // only what a run has learned comes from a checkpoint. It says, too, that it converts tensors.
  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const final;
  absl::Status load_state_dict(const checkpoint::State& state, checkpoint::LoadNotes& notes) final;

 protected:
  // The state of all parameters, complete on rank 0; the reverse.
  virtual absl::StatusOr<optim::Dict> WholeState() = 0;
  virtual absl::Status LoadWholeState(const c10::IValue& state) = 0;
  // Multiplies gradients in place, at least those that this rank steps with.
  virtual void MultiplyGradients(double factor) = 0;
  // Returns what was read as LoadWholeState takes it: with numbers for names. Instead of tensors
  // there may be lists of this rank's pieces of them.
  virtual absl::StatusOr<optim::Dict> Numbered(const checkpoint::State& state) const;

  const optim::ParameterNames& names() const { return names_; }  // or none
  const optim::ParameterNames& saved_names() const { return saved_names_; }

 private:
  // Returns the types of the first entry of `state`, which has numbers, that is not of StateDtype;
  // empty if this rank takes none.
  std::string Conversion(const c10::IValue& state) const;

  const std::unique_ptr<GradScaler> scaler_;
  optim::ParameterNames names_;
  optim::ParameterNames saved_names_;
};

// Every rank has the whole `optimizer` and steps with gradients that `parallel`, the wrapper of its
// parameters' module, has averaged.
std::unique_ptr<DistributedOptimizer> MakeReplicated(
    std::unique_ptr<torch::optim::Optimizer> optimizer, std::shared_ptr<ModelWrapper> parallel,
    std::unique_ptr<GradScaler> scaler);

}  // namespace ddp
