#include "ddp/trainer/step_optimizer.h"

#include <utility>

#include "base/option_error.h"
#include "base/status.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/zero/sharded_optimizer.h"
#include "ddp/zero/zero_redundancy_optimizer.h"

namespace ddp::trainer {

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

}  // namespace ddp::trainer
