// One optimizer step of a run. Private to this folder.
//
//   TrainingStep step(run, {.log_every = 10}, /*stop=*/nullptr, saver);
//   step.BeginEpoch();
//   do {
//     DDP_ASSIGN_OR_RETURN(more, step.Take(*loader));
//   } while (more);
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/loader.h"
#include "ddp/join.h"
#include "ddp/trainer/logging/metric_sink.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/saver.h"
#include "ddp/trainer/step_agreement.h"

namespace ddp::trainer {

// What the ranks have agreed on before the first step; the same on all of them.
struct StepPlan {
  int64_t stop_at_step = 0;  // 0: none
  int64_t log_every = 0;     // steps between two records; 0: there are no logs
};

// Thread-compatible. In a Join, ranks that have run out of batches take the part of each step that
// comes after backward, too, so that parameters, optimizer and position stay the same on all ranks.
class TrainingStep final : public Joinable {
 public:
  // `run` has been set up. `stop`: if any rank has TrainerOptions::on_step; else null. All of them
  // outlive this.
  TrainingStep(Run& run, const StepPlan& plan, StepAgreement* stop, Saver& saver);

  // Before the first step of an epoch, or of what is left of it.
  void BeginEpoch();

  // Collective. Takes a step with this rank's next batches, and saves after it if that is due.
  // False: it was the last of the epoch or of the run, or this rank has no batch left, in a Join.
  absl::StatusOr<bool> Take(data::Loader& loader);

  // Whether the run takes no more steps: a limit is reached, or on_step has asked for it.
  bool stopped() const { return stopped_; }
  // "max_steps=20", the limit that is reached; empty if none is.
  std::string ReachedLimit() const;
  // Of rank 0 in the current epoch.
  int64_t batches_left() const { return batches_left_; }
  int64_t step_in_epoch() const { return step_in_epoch_; }
  bool has_trained() const { return has_trained_; }
  // Of this rank's last step as a shadow.
  const absl::Status& shadow_status() const { return shadow_status_; }

  c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override {
    return run_.session.process_group();
  }
  c10::Device join_device() const override { return run_.session.device(); }
  void Shadow(const JoinOperation& operation) override;

 private:
  absl::StatusOr<at::Tensor> ForwardBackward(data::Loader& loader);
  absl::Status Update(const at::Tensor& loss);
  void Advance();
  absl::Status CheckAgreement();
  // Whether the next step is recorded in the logs.
  bool IsDue() const {
    const int64_t step = run_.position.step;
    return plan_.log_every > 0 && ((step + 1) % plan_.log_every == 0 || step == 0);
  }
  void AddLoss(const at::Tensor& loss, int64_t examples);
  absl::StatusOr<double> MeanLoss();
  // Bytes that have been sent up to a step.
  struct Volume {
    int64_t step = 0;
    std::optional<int64_t> gradients = std::nullopt;   // nullopt: a hook does not count
    std::optional<int64_t> parameters = std::nullopt;  // nullopt: the optimizer sends none
  };
  Volume VolumeSoFar() const;
  void AddVolume(std::vector<logging::Metric>& metrics);

  Run& run_;
  const StepPlan plan_;
  StepAgreement* const stop_;
  Saver& saver_;
  bool stopped_ = false;
  bool has_trained_ = false;
  int64_t step_in_epoch_ = 0;
  int64_t batches_left_ = 0;
  absl::Status shadow_status_;
  // Of the step's batches on this rank, if IsDue().
  at::Tensor loss_sum_;  // over examples, double
  int64_t loss_examples_ = 0;
  Volume volume_;  // at the record before
};

}  // namespace ddp::trainer
