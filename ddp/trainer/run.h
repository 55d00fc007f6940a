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

#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/data/sampler.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_wrapper.h"
#include "ddp/trainer/lr_scheduler.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/precision.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/saving_ranks.h"
#include "ddp/trainer/trainer.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {

// The arguments, but for the task, must outlive it. Thread-compatible.
struct Run {
  Run(const session::Session& session, const Task& task, const data::Dataset& train,
      const data::Dataset& test, const TrainerOptions& options)
      : session(session),
        task(InPrecision(task, options.precision)),
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
  // Optimizer steps from the present position to the run's end.
  int64_t RemainingSteps() const;

  const session::Session& session;
  const Task task;  // forward is in the run's precision
  const data::Dataset& train;
  const data::Dataset& test;
  const TrainerOptions& options;

  Position position = {};
  std::optional<data::DistributedSampler> sampler;
  std::shared_ptr<ModelWrapper> parallel;
  std::unique_ptr<DistributedOptimizer> optimizer;
  std::unique_ptr<LRScheduler> scheduler;
  std::unique_ptr<RunLog> log;
  std::unique_ptr<SavingRanks> saving_ranks;     // the manager's; null: the session
  std::unique_ptr<checkpoint::Manager> manager;  // null: no checkpoints

  // All that has state, and the objects that give and take it for others.
  Components components;
  std::vector<std::unique_ptr<checkpoint::Stateful>> adapters;
  const BucketOrder* bucket_order = nullptr;  // one of them
  RankBuffers* rank_buffers = nullptr;        // likewise; null: all ranks have the same buffers
  std::vector<std::string> unclaimed = {};    // Report::unclaimed
  bool is_initialised = false;                // with the weights of CheckpointOptions::init_from
};

}  // namespace ddp::trainer
