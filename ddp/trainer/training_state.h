// Converts the state of a run to and from the State of a checkpoint:
//
//   {task, model, optimizer, scheduler, progress, epoch, sample, step, seed, dataset_size,
//    world_size, rng, device_rng, scaler}
//
// TrainingRun adds `bucket_order`, if the wrapper has one, and `config`, which only people and
// other programs read.
//
// docs/checkpoint.md describes the keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/state.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/session/session.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/task.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

// Collective: gathers the state of every rank's random generator, and on rank 0 that of a sharded
// optimizer. All else is the same on all ranks. Tensors share memory with module and optimizer.
// `lr`: before the schedule. `scaler`: null if the run has none, and then the state has none.
// InvalidArgument for optimizers that OptimizerState does not support.
absl::StatusOr<checkpoint::State> CaptureState(const session::Session& session, const Task& task,
                                               torch::optim::Optimizer& optimizer, double lr,
                                               const Schedule& schedule, const Position& position,
                                               const GradScaler* scaler);

// Loads `state` into module, optimizer and scaler, whose options stay as they are: only what a run
// has learned comes from the checkpoint. Restores each rank's random generator if the world size is
// the same; in another world each rank seeds it from seed, rank, world size and position, so that
// no rank draws the numbers of the run's start again. A state without `sample`, from an earlier
// version, is at the start of its epoch; without `scaler`, of a run in another precision, the scale
// starts anew. Adds the options that differ to `differences`: "optimizer.momentum 0.5, saved 0.9".
// InvalidArgument names the key or shape that does not fit. If the model does not fit, nothing has
// changed; if the optimizer does not fit, the module has been loaded already. Not collective.
absl::StatusOr<Position> RestoreState(const checkpoint::State& state,
                                      const session::Session& session, const Task& task,
                                      torch::optim::Optimizer& optimizer, GradScaler* scaler,
                                      std::vector<std::string>& differences);

// What ModelWrapper::bucket_order() was; empty if `state` has none, as older checkpoints.
// InvalidArgument if it is not a list of integers.
absl::StatusOr<std::vector<int64_t>> BucketOrder(const checkpoint::State& state);

// InvalidArgument if `state` was saved within an epoch whose examples have another order with the
// seed and the size of data set of `now`. Between epochs, what differs is added to `differences`.
absl::Status CheckOrder(const checkpoint::State& state, const Position& now,
                        std::vector<std::string>& differences);

// How far the run of `state`, which is at `position`, had come in its schedule; of older
// checkpoints, as far as `schedule`, the present one from the beginning, would be. InvalidArgument
// names the key that makes no sense.
absl::StatusOr<SavedProgress> ProgressOf(const checkpoint::State& state, const Schedule& schedule,
                                         const Position& position);

// Adds the options of the learning rate that differ to `differences`: "schedule.gamma 0.5, saved
// 0.1". `lr`: before the schedule.
void CompareSchedule(const checkpoint::State& state, double lr, const Schedule& schedule,
                     std::vector<std::string>& differences);

// Loads the model only, for evaluation. Position fields that `state` lacks are 0. Errors as
// RestoreState. Not collective.
absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const Task& task);

}  // namespace ddp::trainer
