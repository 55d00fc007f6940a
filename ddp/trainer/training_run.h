// One run of Train on one rank. Private to trainer.cc.
//
//   absl::StatusOr<Report> report = TrainingRun(session, task, train, test, options).Execute();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/manager.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/data/loader.h"
#include "ddp/data/sampler.h"
#include "ddp/data_parallel.h"
#include "ddp/join.h"
#include "ddp/trainer/logging/metric_sink.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/precision.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/stop.h"
#include "ddp/trainer/trainer.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

// The arguments, but for the task, must outlive it. Thread-compatible.
class TrainingRun {
 public:
  TrainingRun(const session::Session& session, const Task& task, const data::Dataset& train,
              const data::Dataset& test, const TrainerOptions& options)
      : session_(session),
        task_(InPrecision(task, options.precision)),
        train_(train),
        test_(test),
        options_(options) {}

  // Collective; call it once. If a rank fails, all ranks return its error.
  absl::StatusOr<Report> Execute();

 private:
  // The functions are in the order of a run: set-up (training_setup.cc), …
  absl::Status Prepare();
  absl::Status CheckWrappedModule() const;
  absl::Status OpenManager();
  absl::Status OpenLog();
  absl::Status Wrap();
  absl::Status UseWrapper();
  absl::Status CheckWhoReduces() const;
  absl::Status CheckIgnored() const;
  absl::Status ShardOptimizer();
  absl::Status Resume();
  absl::Status WriteConfiguration() const;
  absl::Status Restore(const std::string& path, std::vector<int64_t>& bucket_order);
  absl::Status CheckSameState(const std::string& path) const;
  absl::Status RestoreBucketOrder(const std::vector<int64_t>& saved);
  absl::Status RefuseToOverwrite(const std::string& resumed) const;
  absl::Status AgreeOnSteps();

  // … and the epochs (training_run.cc).
  absl::Status Run();
  void EnterTraining();
  absl::Status TrainEpoch();
  absl::Status TrainBatches(data::Loader& loader);
  absl::StatusOr<at::Tensor> Accumulate(data::Loader& loader, int64_t batches);
  absl::Status TakeStep(const at::Tensor& loss);
  absl::StatusOr<double> MeanLoss();
  // Bytes that have been sent up to a step.
  struct Volume {
    int64_t step = 0;
    std::optional<int64_t> gradients = std::nullopt;  // nullopt: a hook does not count
    int64_t parameters = 0;
  };
  Volume VolumeSoFar() const;
  void AddVolume(std::vector<logging::Metric>& metrics);
  absl::Status EvaluateNow();
  bool SavesNow() const;
  absl::Status Save(const std::string& name);

  // Shorthands.
  int rank() const { return session_.rank(); }
  int world_size() const { return session_.size(); }
  bool is_main() const { return session_.is_main(); }

  // "max_steps=20", if the run takes no step more; empty if it does.
  std::string ReachedLimit() const;
  // Whether the next step is recorded in the logs.
  bool IsDue() const {
    return log_every_ > 0 && ((position_.step + 1) % log_every_ == 0 || position_.step == 0);
  }
  // Batches and optimizer steps from position `sample` of an epoch to its end, of rank 0.
  int64_t BatchesFrom(int64_t sample) const;
  int64_t StepsFrom(int64_t sample) const;
  // Optimizer steps from the present position to the run's end.
  int64_t RemainingSteps() const;
  // The part of a step after backward, in a Join. Ranks without batches take it, too, so that
  // parameters, optimizer and position stay the same on all ranks.
  class StepInJoin final : public Joinable {
   public:
    explicit StepInJoin(TrainingRun& run) : run_(run) {}
    c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override {
      return run_.session_.process_group();
    }
    c10::Device join_device() const override { return run_.session_.device(); }
    void Shadow(const JoinOperation& operation) override;
    absl::Status Step(const at::Tensor& loss);

    absl::Status status;  // of this rank's last step as a shadow

   private:
    TrainingRun& run_;
  };

  const session::Session& session_;
  const Task task_;
  const data::Dataset& train_;
  const data::Dataset& test_;
  const TrainerOptions& options_;

  Position position_;
  bool trained_ = false;  // this run has taken a step
  bool stopped_ = false;  // no more steps: a limit, or a request of on_step
  bool trains_ = false;   // modules have been put into training mode
  // The modes that the user has given the modules, if he has not put all into evaluation mode.
  std::optional<ModuleModes> modes_;
  // The same on all ranks.
  int64_t stop_at_step_ = 0;  // 0: none
  int64_t log_every_ = 0;     // steps between two records; 0: there are no logs
  // Of the step's batches on this rank, if IsDue().
  at::Tensor loss_sum_;  // over examples, double
  int64_t loss_examples_ = 0;
  int64_t step_in_epoch_ = 0;
  int64_t batches_left_ = 0;  // of rank 0 in the current epoch
  StepInJoin step_in_join_{*this};
  Volume volume_;  // at the record before
  std::optional<Evaluation> evaluation_;
  std::vector<at::Tensor> parameters_;  // the trainable ones
  std::optional<data::DistributedSampler> sampler_;
  std::optional<Schedule> schedule_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  zero::ZeroRedundancyOptimizer* zero_ = nullptr;  // optimizer_, where it is sharded
  std::unique_ptr<GradScaler> scaler_;             // with precision fp16
  std::unique_ptr<checkpoint::Manager> manager_;
  std::optional<checkpoint::Loaded> newest_;  // between choosing and restoring
  std::unique_ptr<RunLog> log_;
  std::shared_ptr<ModelWrapper> parallel_;
  std::optional<StopAgreement> stop_;  // if any rank has on_step
};

}  // namespace ddp::trainer
