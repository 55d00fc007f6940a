#include "ddp/trainer/options.h"

#include "base/option_error.h"
#include "base/status.h"

namespace ddp::trainer {

absl::Status Validate(const TrainerOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(InGroup("checkpoint", checkpoint::Validate(options.checkpoint.manager)));
  DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::Validate(options.comm_hook)));
  if (options.zero.stage == 2) {
    DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::WireDtypeOf(options.comm_hook).status()));
  }
  if (options.zero.stage == 2 && options.data_parallel.static_graph) {
    return OptionError("data_parallel.static_graph", "true",
                       "has no effect with zero.stage=2, which reduces gradients itself; use stage "
                       "0 or 1, or leave it out");
  }
  const std::string& resume = options.checkpoint.resume;
  if ((resume == "auto" || resume == "best") && options.checkpoint.manager.directory.empty()) {
    return OptionError("checkpoint.resume", resume, "needs a folder to look in: checkpoint.dir");
  }
  if (options.eval_only && options.checkpoint.resume.empty()) {
    return OptionError("eval_only", "true",
                       "needs resume, a path or auto: the checkpoint to evaluate");
  }
  if (!options.even_batches && !options.join.divide_by_initial_world_size &&
      options.zero.stage < 2 && options.comm_hook.name != "allreduce") {
    return OptionError("comm_hook.name", options.comm_hook.name,
                       "does not know how many ranks still have batches, which "
                       "join.divide_by_initial_world_size=false divides by; use allreduce, or "
                       "divide by all");
  }
  if (options.sync_bn != "none" && !options.even_batches &&
      !options.join.throw_on_early_termination) {
    return OptionError("sync_bn", options.sync_bn,
                       "communicates within forward, which ranks without batches cannot shadow: "
                       "it needs even_batches, or throw_on_early_termination");
  }
  return absl::OkStatus();
}

}  // namespace ddp::trainer
