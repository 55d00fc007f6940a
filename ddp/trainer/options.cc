#include "ddp/trainer/options.h"

#include "base/option_error.h"
#include "base/status.h"

namespace ddp::trainer {

absl::Status Validate(const TrainerOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::Validate(options.comm_hook)));
  if (options.zero.stage == 2) {
    DDP_RETURN_IF_ERROR(InGroup("comm_hook", hooks::WireDtypeOf(options.comm_hook).status()));
  }
  if (options.checkpoint.resume == "auto" && options.checkpoint.manager.directory.empty()) {
    return OptionError("checkpoint.resume", "auto", "needs a folder to look in: checkpoint_dir");
  }
  if (options.eval_only && options.checkpoint.resume.empty()) {
    return OptionError("eval_only", "true",
                       "needs resume, a path or auto: the checkpoint to evaluate");
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
