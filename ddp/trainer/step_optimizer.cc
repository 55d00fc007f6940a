#include "ddp/trainer/step_optimizer.h"

#include <optional>
#include <unordered_set>
#include <utility>

#include "base/option_error.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/zero/sharded_optimizer.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {
namespace {

// The gradients of optimizers' parameters, which they have again at its end: what a backward adds
// to them in between is dropped.
class KeptGradients {
 public:
  KeptGradients() = default;
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;
  // The last one first: of a parameter that is listed twice, the first entry has the gradient.
  ~KeptGradients() {
    for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
      it->first.mutable_grad() = std::move(it->second);
    }
  }

  // But for parameters in `except`, which both have. `copies`: of views of a wrapper's buckets,
  // where it may reduce other gradients.
  void Keep(const torch::optim::Optimizer& optimizer,
            const std::unordered_set<const c10::TensorImpl*>& except, bool copies) {
    const c10::NoGradGuard no_grad;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (except.contains(parameter.unsafeGetTensorImpl())) continue;
        at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
        if (copies && gradient.defined()) gradient = gradient.clone();
        kept_.emplace_back(parameter, std::move(gradient));
      }
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

}  // namespace

absl::StatusOr<StepOptimizer> MakeStepOptimizer(
    const session::Session& session, const TrainerOptions& options,
    const OptimizerOptions& optimizer, const OptimizerMaker& maker, const NamedTensors& parameters,
    const std::shared_ptr<ModelWrapper>& parallel, bool all_ranks_write) {
  const c10::intrusive_ptr<c10d::ProcessGroup>& group = session.process_group();
  StepOptimizer made;
  std::unique_ptr<GradScaler> scaler = GradScaler::Disabled();
  if (options.precision == "fp16") {
    DDP_ASSIGN_OR_RETURN(scaler, GradScaler::Create(options.grad_scaler, session.device(), group));
  }
  absl::StatusOr<ParameterGroups> all = GroupParameters(optimizer, maker, parameters);
  DDP_RETURN_IF_ERROR(InGroup("optimizer", all.status()));
  if (all->groups.size() > 1) made.groups = std::move(all->descriptions);
  if (options.zero.stage < 2) {  // stage 2 reduces gradients itself
    DDP_RETURN_IF_ERROR(
        InGroup("comm_hook", hooks::Register(options.comm_hook, group, *parallel, &made.hook)));
  }
  if (options.zero.stage == 0) {
    made.optimizer = MakeReplicated(all->make(std::move(all->groups)), parallel, std::move(scaler));
    made.optimizer->NameParameters(std::move(all->names), all_ranks_write);
    return made;
  }
  zero::ZeroOptions zero = options.zero;
  zero.bucket_cap_mb = options.data_parallel.bucket_cap_mb.value_or(zero.bucket_cap_mb);
  zero.find_unused_parameters = options.data_parallel.find_unused_parameters;
  if (zero.stage == 2) {
    DDP_ASSIGN_OR_RETURN(zero.gradient_dtype, hooks::WireDtypeOf(options.comm_hook));
  }
  DDP_ASSIGN_OR_RETURN(auto sharded,
                       zero::ZeroRedundancyOptimizer::Create(std::move(all->groups), group,
                                                             std::move(all->make), zero));
  made.optimizer = zero::MakeSharded(std::move(sharded), std::move(scaler), &session,
                                     /*places=*/!all_ranks_write);
  made.optimizer->NameParameters(std::move(all->names), all_ranks_write);
  return made;
}

void BackwardOf(DistributedOptimizer& optimizer, const at::Tensor& loss,
                const std::vector<DistributedOptimizer*>& others, const TrainerOptions& options) {
  if (others.empty()) return optimizer.Backward(loss);
  std::vector<at::Tensor> inputs;
  std::unordered_set<const c10::TensorImpl*> own;
  for (const auto& group : optimizer.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      own.insert(parameter.unsafeGetTensorImpl());
      if (parameter.requires_grad()) inputs.push_back(parameter);
    }
  }
  if (options.zero.stage == 2) {
    // The others would reduce what reaches their parameters at once, so that nothing may.
    if (!inputs.empty()) optimizer.Backward(loss, inputs);
    return;
  }
  // Not with chosen inputs: the wrapper of a model that the loss reads may wait for its gradients.
  KeptGradients kept;
  for (DistributedOptimizer* other : others) {
    kept.Keep(other->optimizer(), own, options.data_parallel.gradient_as_bucket_view);
  }
  loss.backward();
}

}  // namespace ddp::trainer
