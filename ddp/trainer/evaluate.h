// Evaluation over a whole dataset, on all ranks together.
//
//   DDP_ASSIGN_OR_RETURN(Evaluation result, Evaluate(session, task, test, {.batch_size = 256}));
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"
#include "ddp/data/loader.h"
#include "ddp/session/session.h"
#include "ddp/trainer/task.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// Means over all examples of the dataset.
struct Evaluation {
  double loss = 0;
  double accuracy = 0;  // in [0, 1]
  int64_t examples = 0;
};

// Its values by their names in logs and checkpoints: "test/accuracy", "test/loss".
inline std::map<std::string, double> Metrics(const Evaluation& evaluation) {
  return {{"test/accuracy", evaluation.accuracy}, {"test/loss", evaluation.loss}};
}

// One element per example of the dataset, in its order: int64 [n].
struct Predictions {
  at::Tensor target;
  at::Tensor prediction;  // the class of the largest output
};

// The modes, training or evaluation, of a module and of all modules in it. Module::train() would
// put those into training that the user has frozen with eval(), such as a BatchNorm whose
// statistics must stay. A value; keeps the modules alive. Thread-compatible.
class ModuleModes {
 public:
  // Takes down the present modes. `module` must be owned by a shared_ptr.
  explicit ModuleModes(torch::nn::Module& module);

  // Gives each module the mode that it had.
  void Restore() const;
  // After train(): only puts into evaluation mode what was in it.
  void RestoreEval() const;

 private:
  // A module is before those in it, whose modes its own train() changes.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

// Collective. Every example counts once, whatever the world size; all ranks get the same result.
// Runs the module in evaluation mode and restores the mode of each module in it. Communicates once,
// in a final all-reduce, so ranks may have different numbers of batches. With `predictions` (all
// ranks or none) it gathers these as well, onto all ranks.
//
// InvalidArgument: empty dataset or bad loader options; `predictions` of a task whose outputs are
// not [n, classes] with targets [n]. A rank whose data or model fails returns
// before the all-reduce, in which the others wait: see Session::ShareFailure.
absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::Dataset& dataset,
                                    const data::LoaderOptions& loader_options,
                                    Predictions* predictions = nullptr);

// Replaces `path`: {"index": 0, "target": 9, "prediction": 9}, one line per example. Not
// collective.
absl::Status WritePredictions(const Predictions& predictions, const std::string& path);

}  // namespace ddp::trainer
