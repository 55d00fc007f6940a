// Ends a run whose evaluation no longer improves.
//
//   options.early_stopping = {.metric = "test/loss:min", .patience = 5};
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "checkpoint/retention.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/callbacks/options.h"

namespace ddp::trainer {

// Asks for the end after the evaluation that is the `patience`-th in a row without an improvement:
// none is better than the best before by more than min_delta. NaN is never better. The metric is
// the same on all ranks, and so is the decision. A run that has ended so and is resumed ends again
// at once; with more patience it goes on.
//
// State in checkpoints: the best value, and the evaluations since. Those are counted that precede a
// save: a run that is stopped within an epoch, and evaluates its end, does not count that one after
// a resume.
class EarlyStopping final : public Callback, public checkpoint::Stateful {
 public:
  // `options` have passed Validate. A metric that an evaluation lacks ends the run with
  // InvalidArgument, which names those that there are.
  explicit EarlyStopping(const EarlyStoppingOptions& options);
  // OptionError, by "metric": not METRIC:max or METRIC:min.
  static absl::Status Validate(const EarlyStoppingOptions& options);

  std::string name() const override { return "early_stopping"; }
  checkpoint::Stateful* stateful() override { return this; }
  absl::Status OnSetUp(CallbackContext& run) override;
  absl::Status OnStart(CallbackContext& run) override;
  absl::Status OnEvaluationEnd(CallbackContext& run,
                               const std::map<std::string, double>& metrics) override;

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  void StopIfDue(CallbackContext& run) const;

  const EarlyStoppingOptions options_;
  const checkpoint::BestMetric metric_;
  double best_ = std::numeric_limits<double>::quiet_NaN();  // NaN: there is none yet
  int64_t since_ = 0;
};

}  // namespace ddp::trainer
