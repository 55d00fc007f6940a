// Converts the state of a run to and from the State of a checkpoint:
//
//   {task, model, optimizer, scheduler, epoch, sample, step, seed, world_size, rng, device_rng,
//    scaler}
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
// `scaler`: null if the run has none, and then the state has none. InvalidArgument for optimizers
// that OptimizerState does not support.
absl::StatusOr<checkpoint::State> CaptureState(const session::Session& session, const Task& task,
                                               torch::optim::Optimizer& optimizer,
                                               const Schedule& schedule, const Position& position,
                                               const GradScaler* scaler);

// Loads `state` into module and optimizer. Restores each rank's random generator if the world size
// is the same; otherwise the generators keep their seeds. A state without `sample`, from an earlier
// version, is at the start of its epoch; without `scaler`, of a run in another precision, the scale
// starts anew. InvalidArgument names the key or shape that does not fit.
// If the model does not fit, nothing has changed; if the optimizer does not fit, the module has
// been loaded already. Not collective.
absl::StatusOr<Position> RestoreState(const checkpoint::State& state,
                                      const session::Session& session, const Task& task,
                                      torch::optim::Optimizer& optimizer, GradScaler* scaler);

// What ModelWrapper::bucket_order() was; empty if `state` has none, as older checkpoints.
// InvalidArgument if it is not a list of integers.
absl::StatusOr<std::vector<int64_t>> BucketOrder(const checkpoint::State& state);

// InvalidArgument if `state` was trained with another seed, which would change the order of
// examples during the run.
absl::Status CheckSeed(const checkpoint::State& state, int64_t seed);

// Differences between `schedule` and the one in `state`, such as "total_steps 938, saved 469". A
// resumed run equals the uninterrupted one only if there are none.
std::vector<std::string> ScheduleDifferences(const checkpoint::State& state,
                                             const Schedule& schedule);

// Loads the model only, for evaluation. Position fields that `state` lacks are 0. Errors as
// RestoreState. Not collective.
absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const Task& task);

}  // namespace ddp::trainer
