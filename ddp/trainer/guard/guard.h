// The guard of a run: finds losses and gradients that are not finite or far above their mean, and
// replicas that differ, and says on all ranks alike what follows. Private to ddp/trainer.
//
//   Guard guard(options, session, module, phases);
//   guard.Start(position);
//   do {
//     DDP_RETURN_IF_ERROR(guard.BeginStep(position, samples));
//     Backward();  // unless guard.abandons_step(): the step is left out
//     DDP_RETURN_IF_ERROR(guard.Check(phase, measured));
//     if (!guard.abandons_step()) optimizer.step();
//   } while (!guard.interruption());
//
// docs/training_guard.md says what users see.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/name.h"
#include "checkpoint/staging.h"
#include "checkpoint/stateful.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_tensors.h"
#include "ddp/session/session.h"
#include "ddp/trainer/guard/options.h"
#include "ddp/trainer/position.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// An anomaly that was found; the same on all ranks.
struct Anomaly {
  enum class Action { kSkip, kRollBack, kStop };
  Action action = Action::kStop;
  std::string what;  // "rank 1: step 12: the loss is nan; examples 5, 9 of rank 1"
  // Names and texts, for a log.
  std::vector<std::pair<std::string, std::string>> fields;
  // The checkpoint of kRollBack: newer ones may have been saved after it.
  checkpoint::CheckpointName newest_good = {};
};

// A phase of the task. What it refers to outlives the guard.
struct GuardedPhase {
  std::string name;         // for messages; empty: there is one phase
  NamedTensors parameters;  // that it trains
  DistributedOptimizer* optimizer = nullptr;
  checkpoint::Stateful* hook = nullptr;  // its communication hook, if that has state
};

// Values of the last steps.
class RecentValues {
 public:
  explicit RecentValues(int64_t most) : most_(static_cast<size_t>(most)) {}

  void Add(double value) {
    values_.push_back(value);
    if (values_.size() > most_) values_.pop_front();
  }
  struct Spread {
    double mean = 0;
    double deviation = 0;  // the standard deviation, of a sample
  };
  // nullopt: there are fewer values than half of the most.
  std::optional<Spread> spread() const;

  const std::deque<double>& values() const { return values_; }

 private:
  size_t most_;
  std::deque<double> values_;
};

// Thread-compatible; backward's threads call hooks of its on the parameters. All ranks make the
// same calls, also those that have run out of batches.
//
// Costs, per step: the norm of each gradient as it is computed, and that of all; one all-gather of
// 32 bytes per phase; with on_anomaly=skip a copy of buffers and of the hooks' state, and of a task
// with several phases one of the parameters and optimizers of all but the last.
//
// Its state, the same on all ranks: the values of the last steps, how many of them in a row were
// skipped, what is left out on replay, and how often the run has rolled back. A load adds what this
// object knows to the latter two.
class Guard final : public checkpoint::Stateful {
 public:
  static constexpr int64_t kMostRollBacks = 3;  // of a run

  // Make it after the model is wrapped. `session` and `module` outlive this.
  Guard(const GuardOptions& options, const session::Session& session, torch::nn::Module& module,
        std::vector<GuardedPhase> phases);
  ~Guard() override;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Call it before the first step, and after a rollback: all ranks have the parameters of one
  // checkpoint.
  void Start(const Position& position);

  // Call it before a step, which takes the next `samples` positions of the epoch's order. Not
  // collective.
  absl::Status BeginStep(const Position& position, int64_t samples);
  // Adds the data set's indices of a batch of the step, on this rank.
  void AddExamples(const std::vector<int64_t>& indices);

  // The values that a phase has on this rank after its backward, with gradients that are unscaled,
  // whole, and not clipped.
  struct Measured {
    double loss = 0;          // its sum over the rank's batches
    double count = 0;         // that it is divided by for the rank's mean
    double all_counts = 0;    // likewise of all ranks
    double norm = 0;          // of all gradients
    bool has_scaler = false;  // which skips steps whose gradients are infinite
  };
  // Collective. If it finds an anomaly, the step is abandoned, and with kSkip undone.
  absl::Status Check(size_t phase, const Measured& measured);

  // Call it after a comparison of the ranks' parameters (AllAgree), with its result. `position` is
  // after the step, which was the last of its epoch if `ends_epoch`. FailedPrecondition is an
  // anomaly, and the result OK.
  absl::Status Compared(const Position& position, bool ends_epoch, const absl::Status& result);

  // Whether nothing more of this step is computed.
  bool abandons_step() const { return abandons_step_; }
  // Set once the run must not take another step before it has rolled back, or must stop.
  const std::optional<Anomaly>& interruption() const { return interruption_; }
  // The run has handled the interruption, and goes on.
  void GoOn() { interruption_.reset(); }
  // Forgets the values of the last steps, which are taken again, after a load of a state without
  // this object's.
  void ForgetValues();
  // Returns what has been skipped in this step; nothing if it was not.
  std::optional<Anomaly> TakeSkipped() { return std::exchange(skipped_, std::nullopt); }

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  // The norms of this rank's gradients of the whole model, before they are reduced.
  struct LocalNorms;
  struct Finding;
  // Positions [begin, end) of an epoch's order.
  struct Range {
    int64_t epoch = 0, begin = 0, end = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };

  absl::Status TakeSnapshot();
  absl::Status Restore();
  std::optional<Finding> Judge(size_t phase, const at::Tensor& rows, const Measured& measured);
  absl::Status Describe(size_t phase, const std::vector<double>& norms, Finding& finding,
                        Anomaly& anomaly);
  void Act(Anomaly anomaly, bool leaves_out);

  const GuardOptions options_;
  const session::Session& session_;
  torch::nn::Module& module_;
  const std::vector<GuardedPhase> phases_;
  std::vector<LocalNorms> local_norms_;  // by phase

  std::vector<RecentValues> losses_, norms_;  // by phase
  std::vector<Range> left_out_;
  int64_t rollbacks_ = 0;
  int64_t skips_ = 0;       // in a row, up to that of last_skip_
  int64_t last_skip_ = -1;  // the number of steps before it

  // The following are of the present step:
  Position position_;
  Range range_;
  std::vector<int64_t> examples_;
  bool abandons_step_ = false;
  std::optional<Anomaly> skipped_;
  std::optional<Anomaly> interruption_;
  // The newest checkpoint that may have been saved before replicas were last known to be the same.
  checkpoint::CheckpointName agreed_;

  // With on_anomaly=skip, these are as before the step:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // and their copies
  std::vector<checkpoint::State> states_;                   // of hooks, then of optimizers
  std::vector<checkpoint::Staging> staging_;                // their memory
};

}  // namespace ddp::trainer
