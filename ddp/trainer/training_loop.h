// The epochs of a run, with evaluation and checkpoints. Private to this folder.
//
//   absl::StatusOr<Report> report = TrainingLoop(run).Execute();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "ddp/data/loader.h"
#include "ddp/trainer/evaluator.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/saver.h"
#include "ddp/trainer/stop_requests.h"
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
  void Close();
  absl::Status Train();
  absl::Status TrainEpoch(TrainingStep& step);
  absl::StatusOr<StepPlan> AgreeOnSteps();
  void EnterTraining();
  absl::Status TakeSteps();
  absl::Status StopWithinEpoch(TrainingStep& step);
  absl::Status StopBetweenEpochs(TrainingStep& step, bool record);
  absl::Status EndEpoch(TrainingStep& step, bool record);
  absl::StatusOr<bool> TakeStepsFromHere(TrainingStep& step, bool rolled_back);
  absl::Status HandleAnomaly();
  absl::Status EvaluateRest(bool record);
  absl::Status Save(const std::string& name, bool is_last);
  bool SavesNow(bool stopped) const;
  // Calls an event of the callbacks, and asks to stop if they do.
  template <typename Event>
  absl::Status Call(Event event) {
    return run_.callbacks.Call(stops_ ? &*stops_ : nullptr, event);
  }
  void RenewStops();
  absl::Status FindCheckpoints(Report& report) const;

  Run& run_;
  bool trains_ = false;  // modules have been put into training mode
  // The modes that the user has given the modules before the first step, if he has not put all into
  // evaluation mode.
  std::optional<ModuleModes> modes_;
  std::optional<StopRequests> stops_;  // unless the run only evaluates
  RunEnd end_;
  bool stops_are_renewed_ = false;
  std::string saved_;         // the name of the last checkpoint
  int64_t end_of_epoch_ = 0;  // Position::sample of the last epoch, at its end
  Evaluator evaluator_;
  Saver saver_;
  std::unique_ptr<data::AnyLoader> loader_;  // of the training set; made for the first epoch
};

}  // namespace ddp::trainer
