// Gradient scaling for float16, as torch.amp.GradScaler: the loss is multiplied by a factor, so
// that small gradients do not become 0, and the gradients are divided by it before the step. The
// factor adapts; steps with infinite gradients are skipped.
//
//   DDP_ASSIGN_OR_RETURN(auto scaler, GradScaler::Create({}, device, group));
//   scaler->scale(loss).backward();
//   scaler->unscale_(*optimizer);          // only to clip, or to look at gradients
//   clip_grad_norm_(parameters, 1.0);      // in stage 2 of ZeRO: the optimizer's own
//   scaler->step(*optimizer);              // skipped if a gradient is infinite or NaN on any rank
//   scaler->update();
#pragma once

#include <memory>
#include <unordered_map>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/amp/options.h"
#include "ddp/join.h"
#include "optim/kind.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/optim/optimizer.h"

namespace ddp {

// Thread-compatible. One object per rank; all ranks make the same calls, and then have the same
// scale and skip the same steps. In a Join over its group it must be in the list: ranks that have
// run out take part in the checks, and in the end have the scale of the others; one that is
// disabled may be.
class GradScaler : public Joinable {
 public:
  // `device`: of the losses and gradients. `group`: ranks that must skip a step together; null if
  // there is one, or, outside of a Join, if gradients are known to be equal. OptionError for
  // options out of range.
  static absl::StatusOr<std::unique_ptr<GradScaler>> Create(
      const GradScalerOptions& options, c10::Device device,
      c10::intrusive_ptr<c10d::ProcessGroup> group);

  // One that does nothing (PyTorch: enabled=False): scale returns the loss, step takes the step,
  // get_scale is 1, the state is empty.
  static std::unique_ptr<GradScaler> Disabled();
  bool is_enabled() const { return scale_.defined(); }

  // `loss` times the scale. For a 16-bit scalar loss the result is float32, because 16 bits lack
  // the range for most scales.
  at::Tensor scale(const at::Tensor& loss) const;

  // Collective (one all-reduce of 4 bytes). Divides the optimizer's gradients by the scale and
  // multiplies them by `factor`, in place, and finds out whether one is infinite or NaN on any
  // rank. An optimizer that is an UnscalesGradients (ddp/unscale_gradients.h), such as a
  // ZeroRedundancyOptimizer, does it itself. At most once between two update() calls. Throws
  // c10::Error: a second call, a float16 gradient of a float16 parameter (unscaling it would
  // underflow, even if the optimizer keeps float32 copies), in a Join a scaler without a group or
  // that is not listed, a failed collective.
  void unscale_(torch::optim::Optimizer& optimizer, double factor = 1);

  // Collective if unscale_ has not been called. Takes a step of the optimizer unless a gradient was
  // infinite or NaN. Returns whether it did. Throws c10::Error: a second call before update().
  bool step(torch::optim::Optimizer& optimizer);

  // Adapts the scale. Call it once per iteration, after all optimizers' steps. Warns, on rank 0,
  // after 10, 20, 40, … skipped iterations in a row. Throws c10::Error if no optimizer's gradients
  // have been checked; on all ranks, if the scale cannot be reduced further, below 1e-30 (a NaN
  // that stays), where PyTorch's would become 0.
  void update();

  // Reads the device, which synchronises.
  double get_scale() const;

  // PyTorch's keys: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker. A
  // tracker that has passed the interval, as with a shorter one than it was saved with, lets the
  // scale grow after the next finite iteration.
  optim::Dict state_dict() const;
  // InvalidArgument names the missing or invalid key; nothing has changed then.
  absl::Status load_state_dict(const optim::Dict& state);
  // Whether a load would take it.
  static absl::Status CheckStateDict(const optim::Dict& state);

  // Join uses these (ddp/join.h).
  c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override { return group_; }
  c10::Device join_device() const override { return device_; }
  bool TakesPart() const override { return is_enabled(); }
  bool TakesSteps() const override { return false; }
  void Shadow(const JoinOperation& operation) override;
  void FinishJoin(int source) override;

 private:
  GradScaler(const GradScalerOptions& options, c10::Device device,
             c10::intrusive_ptr<c10d::ProcessGroup> group);

  struct Checked {
    bool stepped = false;
    bool found_inf = false;
  };
  void CheckSkipped();
  at::Tensor CheckAndUnscale(torch::optim::Optimizer& optimizer, double inverse) const;
  bool AnyRankFound(const at::Tensor& found) const;

  GradScalerOptions options_;
  const c10::Device device_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Tensor scale_;           // [], float32
  at::Tensor growth_tracker_;  // [], int32: finite steps since the scale changed
  int64_t skipped_ = 0;        // iterations in a row with an infinity or NaN
  std::unordered_map<const torch::optim::Optimizer*, Checked> checked_;  // since the last update
};

}  // namespace ddp
