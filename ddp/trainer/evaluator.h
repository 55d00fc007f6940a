// Decides when and on what a run evaluates: validation data within and at the end of epochs, test
// data as often, or, beside validation data, at the run's end, if there are some. Private to this
// folder.
//
//   Evaluator evaluator(run);
//   evaluator.Begin(store, stops);
//   do {
//     TakeStep();
//     DDP_ASSIGN_OR_RETURN(bool evaluated, evaluator.AfterStep(/*more=*/…));  // may evaluate
//   } while (…);
//   if (evaluator.IsDueAtEpochEnd()) …evaluator.AtEpochEnd(/*record=*/true);
//   …evaluator.Rest(/*record=*/true);  // at the run's end
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/step_agreement.h"
#include "ddp/trainer/stop_requests.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// The values of evaluations by which the run chooses a checkpoint, stops or slows down, by the
// options that name them.
std::set<std::pair<std::string, std::string>> MetricsInOptions(const Run& run);

// Thread-compatible. All ranks make the same calls. Evaluations leave the generators of random
// numbers as they are, so that they do not change what the run trains; their values are in
// Run::metrics until the next step. Functions that evaluate are collective. They return false where
// an urgent stop has made the ranks give the evaluation up: StopRequests::end says which, callbacks
// got no values, and the run stops here.
class Evaluator {
 public:
  // `run` has been set up, and outlives this.
  explicit Evaluator(Run& run) : run_(run) {}

  // Call it before the first step, unless the run only evaluates. `store` is of this run alone;
  // null with a world size of 1. `stops` outlives this. Throws c10::Error if the store is lost.
  void Begin(const c10::intrusive_ptr<c10d::Store>& store, StopRequests& stops);

  // Collective. Evaluates a few examples, if the task has metrics, or options name some or ask for
  // predictions: those that do not fit, or are none of the evaluation's, are an error now, and not
  // after an epoch.
  absl::Status TryMetrics();

  // Call it after each step. Evaluates the validation data if that is due and the epoch has `more`
  // batches.
  absl::StatusOr<bool> AfterStep(bool more) {
    ForgetEvaluations();
    return run_.validation != nullptr ? ValidateIfDue(more) : true;
  }
  // Does before the first step after a checkpoint what AfterStep does, if the run was stopped in
  // it.
  absl::StatusOr<bool> CatchUp(bool record);

  // The first says whether the run evaluates when Position::epoch counts an epoch; the second does
  // so.
  bool IsDueAtEpochEnd() const;
  absl::StatusOr<bool> AtEpochEnd(bool record);

  // Evaluates what was not evaluated since the last step. Schedules do not know of it; checkpoints
  // do if the run has come to its end and saves after it. `record` also writes it to the logs'
  // files, which have it already if nothing has been trained since.
  absl::StatusOr<bool> Rest(bool record);

  // The last evaluations.
  const std::optional<Evaluation>& validation() const { return validation_; }
  const std::optional<Evaluation>& test() const { return test_; }

  // Call it after the last AfterStep, on all ranks.
  void Close();

 private:
  // What was evaluated is of the step before.
  void ForgetEvaluations() {
    run_.metrics.clear();
    has_validated_ = has_tested_ = false;
  }
  absl::StatusOr<bool> ValidateIfDue(bool more);
  absl::StatusOr<bool> ValidateWithinEpoch(bool record = true);
  absl::StatusOr<bool> Evaluate(bool validation, bool test, bool record);
  absl::Status CountInSchedules();
  bool HasTest() const { return run_.test->size() > 0; }
  bool IsDueByStep() const;

  Run& run_;
  StopRequests* stops_ = nullptr;  // of a run that only evaluates
  std::optional<StepAgreement> agreement_;
  absl::Time last_ = absl::InfinitePast();  // of the validation data
  bool is_due_ = false;
  // Whether these were evaluated since the last step.
  bool has_validated_ = false;
  bool has_tested_ = false;
  std::optional<Evaluation> validation_;
  std::optional<Evaluation> test_;
};

}  // namespace ddp::trainer
