// What a run of Train consists of, on one rank. Private to this folder.
//
//   Run run(session, task, train, test, options);
//   DDP_RETURN_IF_ERROR(SetUp(run));              // setup.h: makes all that is null here
//   DDP_RETURN_IF_ERROR(Resume(run));             // resume.h: loads a checkpoint into it
//   return TrainingLoop(run).Execute();           // training_loop.h
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/data/sampler.h"
#include "ddp/data_parallel.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_wrapper.h"
#include "ddp/trainer/callback_list.h"
#include "ddp/trainer/callbacks/ema.h"
#include "ddp/trainer/lr_scheduler.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/saving_ranks.h"
#include "ddp/trainer/steps.h"
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
  checkpoint::Stateful* hook = nullptr;       // the communication hook, if it has state
  const BucketOrder* bucket_order = nullptr;  // one of Run::adapters
};

// The arguments, but for the task, must outlive it. Thread-compatible.
struct Run {
  Run(const session::Session& session, const Task& task, const data::AnyDataset& train,
      const data::AnyDataset& test, const TrainerOptions& options)
      : session(session),
        task(InSteps(task, options.precision)),
        has_mean_loss(HasMeanLoss(task)),
        train(train),
        test(test),
        options(options) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Shorthands.
  int rank() const { return session.rank(); }
  int world_size() const { return session.size(); }
  bool is_main() const { return session.is_main(); }

  // Batches and optimizer steps from position `sample` of an epoch to its end, of rank 0.
  int64_t BatchesFrom(int64_t sample) const;
  int64_t StepsFrom(int64_t sample) const;
  // Examples of all ranks in `batches` batches of each, after the first `done`, of an epoch from
  // position `sample` on.
  int64_t ExamplesIn(int64_t sample, int64_t done, int64_t batches) const;
  // Optimizer steps from the present position to the run's end.
  int64_t RemainingSteps() const;
  // Gives all ranks rank 0's buffers, which all phases share. Collective; may throw.
  void SyncBuffers() const { phases[0].parallel->SyncBuffers(); }
  // Before parameters are read or written.
  void WaitForParameters() const {
    for (const RunPhase& phase : phases) phase.optimizer->WaitForParameters();
  }

  const session::Session& session;
  const Task task;           // its steps are in the run's precision
  const bool has_mean_loss;  // it was given by `forward` and `loss`
  const data::AnyDataset& train;
  const data::AnyDataset& test;
  const TrainerOptions& options;
  const absl::Time began = absl::Now();

  Position position = {};
  std::optional<data::DistributedSampler> sampler;
  std::vector<RunPhase> phases;  // of the task, in its order; not empty
  std::unique_ptr<RunLog> log;
  std::unique_ptr<SavingRanks> saving_ranks;     // the manager's; null: the session
  std::unique_ptr<checkpoint::Manager> manager;  // null: no checkpoints

  CallbackList callbacks;
  std::shared_ptr<Ema> ema;  // one of them; null: none

  // All that has state, and the objects that give and take it for others.
  Components components;
  std::vector<std::unique_ptr<checkpoint::Stateful>> adapters;
  RankBuffers* rank_buffers = nullptr;      // one of them; null: all ranks have the same buffers
  std::vector<std::string> unclaimed = {};  // Report::unclaimed
  bool is_initialised = false;              // with the weights of CheckpointOptions::init_from
};

}  // namespace ddp::trainer
