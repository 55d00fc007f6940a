// Evaluation over a whole dataset, on all ranks together.
//
//   DDP_ASSIGN_OR_RETURN(Evaluation result, Evaluate(session, task, test, {.batch_size = 256}));
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "ddp/data/dataset.h"
#include "ddp/data/loader.h"
#include "ddp/gather/gather.h"
#include "ddp/gather/gather_for_metrics.h"
#include "ddp/session/session.h"
#include "ddp/trainer/task.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// The result over all examples of the dataset.
struct Evaluation {
  double loss = 0;                             // a mean
  std::map<std::string, double> metrics = {};  // of the steps and of Task::metrics, by name
  std::string table = "";                      // lines of Task::metrics: Metric::Table
  int64_t examples = 0;
};

// The prefixes of an evaluation's values in logs and checkpoints.
inline constexpr char kTest[] = "test/";
inline constexpr char kValidation[] = "val/";

// Its values by their names there: "test/accuracy", "test/loss".
std::map<std::string, double> Metrics(const Evaluation& evaluation,
                                      absl::string_view prefix = kTest);

// InvalidArgument if a step of `task`, whose steps are those of InSteps, gives a metric whose name
// is empty or blank, or that of a value which the trainer has of its own. `phase`: of a training
// step; nullopt: of an evaluation.
absl::Status CheckMetricNames(const Task& task, const std::map<std::string, SumAndCount>& metrics,
                              std::optional<size_t> phase = std::nullopt);

// "accuracy 0.9123 loss 0.2456": the metrics by name, and the loss.
std::string Describe(const Evaluation& evaluation);

// A sum over things and their number, in double precision: counts are exact up to 2^53.
struct Total {
  double sum = 0;
  double count = 0;
  void Add(const SumAndCount& more) {
    sum += more.sum();
    count += more.count();
  }
  double mean() const { return sum / count; }
};

constexpr auto FieldsOf(const Total&) {
  return Fields(Field("sum", &Total::sum), Field("count", &Total::count));
}

// Collective. The totals over all ranks, added in the order of the ranks: the same bits on all. A
// rank may lack names that others have.
absl::StatusOr<std::map<std::string, Total>> AddUp(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::map<std::string, Total>& mine);

// The tensors have one element per example of the dataset, in its order: int64 [n].
struct Predictions {
  at::Tensor target;
  at::Tensor prediction;  // the class of the largest output
};

constexpr auto FieldsOf(const Predictions&) {
  return Fields(Field("target", &Predictions::target),
                Field("prediction", &Predictions::prediction));
}

// The modes, training or evaluation, of a module and of all modules in it. Module::train() would
// put those into training that the user has frozen with eval(), such as a BatchNorm whose
// statistics must stay. A value; keeps the modules alive. Thread-compatible.
class ModuleModes {
 public:
  // Takes down the present modes. `module` must be owned by a shared_ptr.
  explicit ModuleModes(torch::nn::Module& module);

  // Whether any of them is in training mode.
  bool any_training() const;

  // Gives each module the mode that it had.
  void Restore() const;
  // Call it after train(): it only puts into evaluation mode what was in it.
  void RestoreEval() const;

 private:
  // A module is before those in it, whose modes its own train() changes.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

namespace evaluate_internal {

// The predictions of this rank, batch by batch.
class AnyCollector {
 public:
  virtual ~AnyCollector() = default;
  virtual absl::Status Add(data::AnyBatch& predictions, const std::vector<int64_t>& indices) = 0;
};

// Predictions made of the outputs of a classifier: InvalidArgument if they are not [n, classes]
// with targets [n].
absl::StatusOr<Predictions> Classes(const Outputs& outputs);
absl::Status OtherPredictions(const data::AnyBatch& given, const std::type_info& wanted);

template <Tree P>
class Collector final : public AnyCollector {
 public:
  absl::Status Add(data::AnyBatch& given, const std::vector<int64_t>& indices) override {
    if constexpr (std::is_same_v<P, Predictions>) {
      if (given.Is<Outputs>()) {
        DDP_ASSIGN_OR_RETURN(Predictions classes, Classes(given.Get<Outputs>()));
        given = data::AnyBatch(std::move(classes));
      }
    }
    if (!given.Is<P>()) return OtherPredictions(given, typeid(P));
    given.To(c10::Device(c10::kCPU));
    parts_.push_back({indices, std::move(given.Get<P>())});
    return absl::OkStatus();
  }

  // Collective.
  absl::StatusOr<P> Gather(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    return GatherForMetrics(group, std::exchange(parts_, {}));
  }

 private:
  std::vector<std::pair<std::vector<int64_t>, P>> parts_;
};

absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::AnyDataset& dataset,
                                    const data::LoaderOptions& loader_options,
                                    AnyCollector* collector, const std::function<bool()>& gives_up,
                                    int64_t seed);

}  // namespace evaluate_internal

// Collective. Every example counts once, whatever the world size: the loss and each metric of
// task.eval_step are its sum of sums by its sum of counts; task.metrics have the examples of all
// ranks. All ranks get the same result. Runs the
// module in evaluation mode and restores the mode of each module in it. Communicates only in the
// end, so ranks may have different numbers of batches.
//
// InvalidArgument: empty dataset or bad loader options; metrics that the steps do not feed, do not
// fit the outputs, or have two values of one name. A rank whose data or model fails returns
// before the others have communicated, who wait: see Session::ShareFailure.
//
// `gives_up`, called before each batch: if it returns true on any rank, that rank goes on to the
// communication at once, and the result has 0 examples, on all ranks. The others learn of it there,
// unless theirs returns true, too. `seed` is that of the random numbers of examples, which are
// those of their places in the data set.
inline absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                           const data::AnyDataset& dataset,
                                           const data::LoaderOptions& loader_options,
                                           const std::function<bool()>& gives_up = nullptr,
                                           int64_t seed = 0) {
  return evaluate_internal::Evaluate(session, task, dataset, loader_options, nullptr, gives_up,
                                     seed);
}

// Does the same. `predictions` is null on all ranks or none; if it is not, it gets what the steps
// have given as StepOutput::predictions, of all examples in the dataset's order, on all ranks and
// the CPU (GatherForMetrics). Predictions are also made of Outputs. InvalidArgument: the steps give
// none, or of another type; Predictions of outputs that are not [n, classes] with targets [n].
template <Tree P>
absl::StatusOr<Evaluation> Evaluate(const session::Session& session, const Task& task,
                                    const data::AnyDataset& dataset,
                                    const data::LoaderOptions& loader_options, P* predictions,
                                    const std::function<bool()>& gives_up = nullptr,
                                    int64_t seed = 0) {
  evaluate_internal::Collector<P> collector;
  DDP_ASSIGN_OR_RETURN(
      Evaluation evaluation,
      evaluate_internal::Evaluate(session, task, dataset, loader_options,
                                  predictions != nullptr ? &collector : nullptr, gives_up, seed));
  if (predictions != nullptr && evaluation.examples > 0) {
    DDP_ASSIGN_OR_RETURN(*predictions, collector.Gather(session.process_group()));
  }
  return evaluation;
}

// Replaces `path`: {"index": 0, "target": 9, "prediction": 9}, one line per example. Not
// collective.
absl::Status WritePredictions(const Predictions& predictions, const std::string& path);

}  // namespace ddp::trainer
