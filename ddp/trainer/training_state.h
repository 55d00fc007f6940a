// What a run has to remember to go on where it stopped, as the state of a checkpoint:
//
//   {task, model, optimizer, scheduler, epoch, sample, step, seed, world_size, rng}
//
// docs/checkpoint.md has the keys in full.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/state.h"
#include "ddp/session/session.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/task.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

// Collective: gathers every rank's random state, and on rank 0 the state of a sharded optimizer.
// All else is the same on all ranks.
absl::StatusOr<checkpoint::State> CaptureState(const session::Session& session, const Task& task,
                                               torch::optim::Optimizer& optimizer,
                                               const Schedule& schedule, const Position& position);

// Not collective. Puts `state` into module and optimizer. The random state of each rank comes back
// if the world size is what it was; otherwise ranks keep that which they were seeded with. A state
// without `sample`, of an earlier version, stands at the beginning of its epoch.
// InvalidArgument says which key or shape does not fit. If it is of the model, nothing has changed;
// if it is of the optimizer, the module has the checkpoint's model already.
absl::StatusOr<Position> RestoreState(const checkpoint::State& state,
                                      const session::Session& session, const Task& task,
                                      torch::optim::Optimizer& optimizer);

// InvalidArgument if `state` was trained with another seed: the order of examples would change in
// the middle of the run.
absl::Status CheckSeed(const checkpoint::State& state, int64_t seed);

// What of the schedule differs from that in `state`, as "total_steps 938, saved 469". A resumed run
// is the uninterrupted one only if nothing does.
std::vector<std::string> ScheduleDifferences(const checkpoint::State& state,
                                             const Schedule& schedule);

// Not collective. The model alone, for evaluation; of the position what `state` has.
absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const Task& task);

}  // namespace ddp::trainer
