// The epochs of a run, with evaluation and checkpoints. Private to this folder.
//
//   absl::StatusOr<Report> report = TrainingLoop(run).Execute();
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/saver.h"
#include "ddp/trainer/step_agreement.h"
#include "ddp/trainer/training_step.h"

namespace ddp::trainer {

// Thread-compatible.
class TrainingLoop {
 public:
  // `run` has been set up, and resumed if it is to be; it outlives this.
  explicit TrainingLoop(Run& run);

  // Collective; once. If a rank fails, all ranks return its error.
  absl::StatusOr<Report> Execute();

 private:
  absl::Status Train();
  absl::Status TrainEpoch(TrainingStep& step);
  absl::StatusOr<StepPlan> AgreeOnSteps();
  void EnterTraining();
  absl::Status Evaluate(bool record);
  bool SavesNow(bool stopped) const;

  Run& run_;
  bool trains_ = false;  // modules have been put into training mode
  // The modes that the user has given the modules, if he has not put all into evaluation mode.
  std::optional<ModuleModes> modes_;
  std::optional<StepAgreement> stop_;  // if any rank has on_step
  std::optional<Evaluation> evaluation_;
  Saver saver_;
};

}  // namespace ddp::trainer
