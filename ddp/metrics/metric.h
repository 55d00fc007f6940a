// Metrics of an evaluation, exact over any number of ranks and any distribution of the examples.
//
//   metrics::Accuracy accuracy({.k = 5});
//   metrics::Auc auc;
//   DDP_RETURN_IF_ERROR(accuracy.Update(logits, target));  // for each batch
//   …
//   // {"accuracy_top5": 0.98, "auc": 0.91}, the same on all ranks
//   DDP_ASSIGN_OR_RETURN(auto values, metrics::ReduceMetrics(group, {&accuracy, &auc}));
//
// A metric of one's own says what it adds up, and what the value of the sums is:
//
//   class Bias final : public metrics::Metric {
//    public:
//     Bias() : Metric("bias"), sums_(AddSums(at::zeros({2}, at::kDouble))) {}
//     std::map<std::string, double> Values() const override {
//       return {{name(), (sums_[0] / sums_[1]).item<double>()}};
//     }
//    private:
//     absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override {
//       sums_[0] += (output - target).sum();
//       sums_[1] += output.numel();
//       return absl::OkStatus();
//     }
//     at::Tensor& sums_;
//   };
//
// The built-in ones are in mean.h (Mean) and classification.h (Accuracy, ConfusionMatrix, F1, Auc,
// Perplexity). docs/metrics.md says what they do with odd input.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
}

namespace ddp::metrics {

// Values that must be kept whole, such as scores that will be sorted: a list of tensors with one
// row per example, which becomes one tensor. Not thread-safe.
class Rows {
 public:
  // Copies `rows`, of shape [n, …], to the CPU.
  void Append(const at::Tensor& rows);
  // All rows, on the CPU, in the order of their additions; ranks one after the other. An empty
  // tensor of one dimension if there are none.
  const at::Tensor& All() const;

 private:
  mutable std::vector<at::Tensor> parts_;  // All() makes one of them
  mutable at::Tensor all_;                 // undefined after a change
};

// Collects from batches what its values are computed of. Not thread-safe; neither copied nor
// moved, since derived classes have references to its state.
class Metric {
 public:
  virtual ~Metric() = default;
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  // A new one's name is the name of its value, or what its values' names begin with.
  const std::string& name() const { return name_; }

  // Adds a batch of this rank: the model's output, and what it should be. What these are is the
  // metric's matter: Mean takes values and weights. No gradient is recorded. Waits for the device.
  // Not collective: ranks may have different numbers of batches, or none. The errors of Accumulate,
  // and exceptions of torch, begin with the name; then nothing, or a part, has been added.
  // FailedPrecondition after a reduction: Reset comes first.
  absl::Status Update(const at::Tensor& output, const at::Tensor& target = {});

  // The values by name, of what has been added on this rank; after ReduceMetrics, on all. A value
  // that does not exist, such as the mean of nothing, is NaN.
  virtual std::map<std::string, double> Values() const = 0;
  // Lines of text for the end of a run, such as a table by class; empty: there is none.
  virtual std::string Table() const { return ""; }

  // Sets it back to the state of a new one.
  void Reset();

 protected:
  explicit Metric(std::string name) : name_(std::move(name)) {}

  virtual absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) = 0;

  // FailedPrecondition after a reduction, for ways to add something besides Update.
  absl::Status CheckNotReduced() const;

  // The state, declared in the constructor. References are valid as long as the metric is.
  //
  // A tensor that is added up over the ranks, element by element: of dtype double or int64, on the
  // CPU, with the same shape on all ranks. `zeros` is its value in a new metric. Integers, and
  // doubles that are integers up to 2^53, have the same sum whatever the distribution; other
  // doubles depend on the order of the additions in their last digits. Change it in place, or
  // assign a tensor of the same shape and dtype. Throws c10::Error for another dtype or device.
  at::Tensor& AddSums(const at::Tensor& zeros);
  // Rows that are put one after the other, those of rank 0 first. A value that does not depend on
  // their order is exact.
  Rows& AddRows();

 private:
  friend class Reduction;

  const std::string name_;
  std::vector<at::Tensor> zeros_;
  std::vector<std::unique_ptr<at::Tensor>> sums_;
  std::vector<std::unique_ptr<Rows>> rows_;
  bool is_reduced_ = false;
};

// Collective: all ranks pass the same metrics in the same order. Afterwards each metric has the
// state of all ranks, on all of them, and takes no Update before a Reset. Returns all values, the
// same on all ranks. A null group, or one of one rank: the state of this rank.
//
// Costs one AllGather (ddp/gather/gather.h) of all rows and of what the states consist of, and, if
// there are any, one all-reduce for the sums of all metrics. Each rank needs memory for the rows of
// all ranks.
//
// Errors, the same on all ranks: FailedPrecondition if a rank has other metrics, or one that is
// reduced already; InvalidArgument for two values of one name, and for rows whose shapes do not fit
// together. Those of communication are of CatchCollective (ddp/collective_status.h).
absl::StatusOr<std::map<std::string, double>> ReduceMetrics(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, absl::Span<Metric* const> metrics);

// "Float [32, 10]", for messages; "none" for an undefined tensor.
std::string ShapeOf(const at::Tensor& tensor);

}  // namespace ddp::metrics
