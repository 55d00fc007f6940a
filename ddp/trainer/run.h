// The parts of a run of Train, on one rank. Private to this folder.
//
//   Run run(session, task, train, validation, test, options);
//   DDP_RETURN_IF_ERROR(SetUp(run));              // setup.h: makes all that is null here
//   DDP_RETURN_IF_ERROR(Resume(run));             // resume.h: loads a checkpoint into it
//   return TrainingLoop(run).Execute();           // training_loop.h
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/progress_board.h"
#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/data/sampler.h"
#include "ddp/data/subset.h"
#include "ddp/data_parallel.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_wrapper.h"
#include "ddp/trainer/callback_list.h"
#include "ddp/trainer/callbacks/ema.h"
#include "ddp/trainer/guard/guard.h"
#include "ddp/trainer/held_folders.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/saving_ranks.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/task.h"
#include "ddp/trainer/trainer.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {

// A phase of the task in this run. The first one's components are named as those of a task without
// phases: `optimizer`, `scheduler`, …; others are `optimizer.NAME`.
struct RunPhase {
  const Phase* phase = nullptr;
  std::string suffix;       // ".NAME", of names; empty for the first
  NamedTensors parameters;  // that it trains
  std::shared_ptr<ModelWrapper> parallel;
  std::unique_ptr<DistributedOptimizer> optimizer;
  std::unique_ptr<LRScheduler> scheduler;
  checkpoint::Stateful* hook = nullptr;  // the communication hook, if it has state
  BucketOrder* bucket_order = nullptr;   // one of Run::adapters
};

// `task` with further metrics.
inline Task WithMetrics(Task task, const std::vector<std::string>& names) {
  task.metric_names.insert(task.metric_names.end(), names.begin(), names.end());
  return task;
}

// The arguments, but for the task, must outlive it. Thread-compatible.
struct Run {
  // `validation`: null for none.
  Run(const session::Session& session, const Task& task, const data::AnyDataset& train,
      const data::AnyDataset* validation, const data::AnyDataset& test,
      const TrainerOptions& options)
      : session(session),
        task(InSteps(WithMetrics(task, options.metrics), options.precision)),
        has_mean_loss(HasMeanLoss(task)),
        train(&train),
        validation(validation),
        test(&test),
        options(options) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Shorthands.
  int rank() const { return session.rank(); }
  int world_size() const { return session.size(); }
  bool is_main() const { return session.is_main(); }

  // Whether a launcher has started the ranks again. Then the run goes on from what it has saved
  // itself, if anything (has_own_checkpoints), whatever it began from.
  bool is_restarted() const { return session.place().restart_count > 0 && !options.eval_only; }

  // Batches and optimizer steps from position `sample` of an epoch to its end, of rank 0.
  int64_t BatchesFrom(int64_t sample) const;
  int64_t StepsFrom(int64_t sample) const;
  // Examples of all ranks in `batches` batches of each, after the first `done`, of an epoch from
  // position `sample` on.
  int64_t ExamplesIn(int64_t sample, int64_t done, int64_t batches) const;
  // Optimizer steps from the present position to the run's end.
  StepsLeft RemainingSteps() const;
  // Gives all ranks rank 0's buffers, which all phases share. Collective; may throw.
  void SyncBuffers() const { phases[0].parallel->SyncBuffers(); }
  // Collective. Between two steps: each rank has rank 0's buffers while `body` runs, and its own
  // afterwards. May throw what `body` throws.
  absl::Status WithSharedBuffers(const std::function<absl::Status()>& body) const;
  // Names of parameters and buffers that are each rank's own, of the task or of the options.
  const std::vector<std::string>& Ignored() const;
  // Call it before parameters are read or written.
  void WaitForParameters() const {
    for (const RunPhase& phase : phases) phase.optimizer->WaitForParameters();
  }

  const session::Session& session;
  const Task task;           // its steps are in the run's precision
  const bool has_mean_loss;  // it was given by `forward` and `loss`
  // The data sets that are used: those that were given, or parts of them.
  const data::AnyDataset* train;
  const data::AnyDataset* validation;  // null: none
  const data::AnyDataset* test;
  const TrainerOptions& options;
  const absl::Time began = absl::Now();

  HeldFolders folders{session};
  // Whether the checkpoints in the folder are those of earlier lives of this job. The same on all
  // ranks.
  bool has_own_checkpoints = false;
  std::vector<std::unique_ptr<data::Subset>> parts = {};
  Position position = {};
  // The values of the evaluations since the last step, by their names in logs.
  std::map<std::string, double> metrics = {};
  std::optional<data::DistributedSampler> sampler;
  std::vector<RunPhase> phases;  // of the task, in its order; not empty
  std::unique_ptr<RunLog> log;
  bool log_has_steps = false;                 // on the main rank: those of an earlier attempt
  std::optional<ProgressBoard> progress;      // on the main rank: of a launcher that restarts ranks
  std::unique_ptr<SavingRanks> saving_ranks;  // the manager's; null: the session
  std::unique_ptr<checkpoint::Manager> manager;  // null: no checkpoints

  CallbackList callbacks;
  std::shared_ptr<Ema> ema;      // one of them; null: none
  std::unique_ptr<Guard> guard;  // null: nobody looks for anomalies

  // All that has state, and the objects that give and take it for others.
  Components components;
  std::vector<std::unique_ptr<checkpoint::Stateful>> adapters;
  RankBuffers* rank_buffers = nullptr;      // one of them; null: all ranks have the same buffers
  std::vector<std::string> unclaimed = {};  // Report::unclaimed
  bool is_initialised = false;              // with the weights of CheckpointOptions::init_from
  // The name of the checkpoint that it goes on from, if a save would put it there; else empty.
  std::string resumed_from = {};
};

}  // namespace ddp::trainer
