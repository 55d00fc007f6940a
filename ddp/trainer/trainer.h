// The training loop: epochs, gradient accumulation, evaluation, logs, checkpoints, resume.
//
//   TrainerOptions options;
//   options.epochs = 5;
//   DDP_ASSIGN_OR_RETURN(Report report, Train(session, task, train, test, options));
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"
#include "ddp/session/session.h"
#include "ddp/trainer/evaluate.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

struct Report {
  Evaluation test;
  int64_t epochs = 0;  // complete ones, those before a resume included
  int64_t steps = 0;
};

// Collective. Trains task.module on `train`, evaluating on `test` after each epoch; the module, in
// place, ends with the trained parameters, the same on all ranks. With one seed and world size, two
// runs end with the same bits, and so does a run that was resumed between epochs.
// A run that max_steps ends within an epoch saves no part of that epoch.
absl::StatusOr<Report> Train(const session::Session& session, const Task& task,
                             const data::Dataset& train, const data::Dataset& test,
                             const TrainerOptions& options);

// "test accuracy 0.9123 loss 0.2456 epochs 4 wall 61.2 s": the last line of a run.
std::string Summary(const Report& report, double wall_seconds);

}  // namespace ddp::trainer
