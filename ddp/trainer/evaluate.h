// Evaluation over a whole dataset, on all ranks together.
//
//   DDP_ASSIGN_OR_RETURN(Evaluation result, Evaluate(session, task, test, {.batch_size = 256}));
#pragma once

#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"
#include "ddp/data/loader.h"
#include "ddp/session/session.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

// Means over all examples of the dataset.
struct Evaluation {
  double loss = 0;
  double accuracy = 0;  // in [0, 1]
  int64_t examples = 0;
};

// Collective. Every example counts once, whatever the world size; all ranks get the same result.
// Runs the module in evaluation mode and restores its mode. Communicates once, in a final
// all-reduce, so ranks may have different numbers of batches.
//
// InvalidArgument: empty dataset or bad loader options. A rank whose data or model fails returns
// before the all-reduce, in which the others wait: see ShareFailure (failure.h).
absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::Dataset& dataset,
                                    const data::LoaderOptions& loader_options);

}  // namespace ddp::trainer
