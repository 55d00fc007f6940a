// One optimizer step of a run. Private to this folder.
//
//   TrainingStep step(run, {.log_every = 10}, stops, evaluator, saver);
//   step.BeginEpoch();
//   do {
//     DDP_ASSIGN_OR_RETURN(more, step.Take(*loader));
//   } while (more);
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/loader.h"
#include "ddp/join.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/evaluator.h"
#include "ddp/trainer/logging/metric_sink.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/saver.h"
#include "ddp/trainer/stop_requests.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::trainer {

// The plan that the ranks have agreed on before the first step; the same on all of them.
struct StepPlan {
  int64_t stop_at_step = 0;  // 0: none
  int64_t log_every = 0;     // steps between two records; 0: there are no logs
};

// Thread-compatible. In a Join, ranks that have run out of batches take the part of each step that
// comes after backward, too, so that parameters, optimizer and position stay the same on all ranks.
class TrainingStep final : public Joinable {
 public:
  // `run` has been set up. All arguments outlive this.
  TrainingStep(Run& run, const StepPlan& plan, StopRequests& stops, Evaluator& evaluator,
               Saver& saver);

  // Call it before the first step of an epoch, or of what is left of it.
  void BeginEpoch();

  // Collective. Takes a step with this rank's next batches; evaluates and saves after it if that is
  // due.
  // False: it was the last of the epoch or of the run, or this rank has no batch left, in a Join.
  absl::StatusOr<bool> Take(data::AnyLoader& loader);

  // Decides whether the run goes on, as Take does after a step: for other work, as an evaluation.
  absl::Status GoOn();

  // Whether the run takes no more steps: a limit is reached, or a rank has asked for it.
  bool stopped() const { return stopped_; }
  // "max_steps=20", the limit that is reached; empty if none is.
  std::string ReachedLimit() const;
  // Why, if the run has stopped.
  RunEnd end() const;
  // These are rank 0's in the current epoch.
  int64_t batches_left() const { return batches_left_; }
  int64_t step_in_epoch() const { return step_in_epoch_; }
  bool has_trained() const { return has_trained_; }
  // The status of this rank's last step as a shadow.
  const absl::Status& shadow_status() const { return shadow_status_; }

  c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override {
    return run_.session.process_group();
  }
  c10::Device join_device() const override { return run_.session.device(); }
  void Shadow(const JoinOperation& operation) override;

 private:
  // Operations in a Join, of which there are more than one only if the ranks exchange counts.
  enum Operation : int64_t { kUpdate = 0, kExpectCount = 1, kCount = 2, kBegin = 3 };

  // The values that this rank has of a step, by phase.
  struct Sums {
    double count = 0;  // of the losses
    // The mean of the losses and what they count, if there is an on_step or a callback.
    at::Tensor own_loss;
    double own_count = 0;
    // The sum of all ranks' count: a message that is under way, or has come.
    at::Tensor all_counts;  // [1], double
    c10::intrusive_ptr<c10d::Work> counting;
    double counted = 0;  // the same, once it is known
    int64_t steps_without_count = 0;
    // If IsDue(), or there is a guard:
    at::Tensor loss;  // double
    // If IsDue():
    std::map<std::string, Total> metrics;

    void ForgetOwn() {
      own_loss.reset();
      own_count = 0;
    }
  };
  // Tags and values of a record.
  using Record = std::vector<std::pair<std::string, double>>;

  absl::Status BeginStep();
  void Enter(size_t phase);
  void LeavePhases();
  absl::StatusOr<bool> ForwardBackward(size_t phase, data::AnyLoader& loader);
  absl::Status Update(Record& record);
  absl::Status UpdatePhase(size_t phase, Record& record);
  absl::Status Watch(size_t phase);
  absl::Status Finish(Record record);
  absl::Status CheckOutput(size_t phase, const StepOutput& output,
                           const data::AnyBatch& batch) const;
  double Divisor(size_t phase) const;
  void ExpectCount(size_t phase, double count);
  void BeginToCount(size_t phase);
  double CountOfAllRanks(size_t phase);
  double KnownCount() const;
  double ExamplesOfAFullStep() const;
  void Advance();
  int64_t SamplesOf(int64_t batches) const;
  // Whether the guard has ended the step; and whether the run takes none after it, for now.
  bool IsAbandoned() const { return run_.guard != nullptr && run_.guard->abandons_step(); }
  bool IsInterrupted() const { return run_.guard != nullptr && run_.guard->interruption(); }
  void ForgetValues();
  absl::Status ReportSkipped();
  absl::Status CheckAgreement();
  // Whether the next step is recorded in the logs.
  bool IsDue() const {
    const int64_t step = run_.position.step;
    return plan_.log_every > 0 && ((step + 1) % plan_.log_every == 0 || step == 0);
  }
  void Add(size_t phase, const StepOutput& output);
  absl::StatusOr<double> SumOfLosses(Sums& sums);
  absl::Status AddMeans(Record& record, std::optional<double>& loss);
  // Bytes that have been sent up to a step.
  struct Volume {
    int64_t step = 0;
    std::optional<int64_t> gradients = std::nullopt;   // nullopt: a hook does not count
    std::optional<int64_t> parameters = std::nullopt;  // nullopt: the optimizer sends none
  };
  Volume VolumeSoFar() const;
  void AddVolume(Record& record);

  Run& run_;
  const StepPlan plan_;
  StopRequests& stops_;
  Evaluator& evaluator_;
  Saver& saver_;
  const double clip_norm_type_;
  bool stopped_ = false;
  bool has_trained_ = false;
  bool is_in_phase_ = false;  // of several: the parameters of the others are frozen
  int64_t step_in_epoch_ = 0;
  int64_t batches_left_ = 0;
  absl::Status shadow_status_;
  // The place of the epoch's first batch of this TrainingStep, and the number of batches after it.
  int64_t first_sample_ = 0;
  int64_t batches_done_ = 0;
  std::vector<Sums> sums_;  // by phase
  // The batches of a step of several phases, which have the same.
  std::vector<data::AnyBatch> batches_;
  Volume volume_;  // at the record before
};

}  // namespace ddp::trainer
