// Metrics of classifications: accuracy, confusion matrix, F1, area under the ROC curve, perplexity.
//
//   metrics::ConfusionMatrix confusion(10);
//   DDP_RETURN_IF_ERROR(confusion.Update(logits, target));  // [n, 10] and [n]
//   DDP_RETURN_IF_ERROR(metrics::ReduceMetrics(group, {&confusion}).status());
//   std::cout << confusion.Table();  // precision, recall and F1 of each class
//
// Update(output, target) of all but Auc:
// - output: scores [n, classes, …], such as logits or probabilities, in any order of which the
//   largest is the prediction: torch's layout for cross_entropy, with the classes in dimension 1.
//   Where scores are not needed, also the predicted classes, integers of the targets' shape.
// - target: the classes [n, …] from 0, integers, bools, or floats that are whole numbers.
// - Of equal scores the one of the lower class counts as larger. An example with a score that is
//   NaN has no prediction: its target is not recognised, and it is in no class's predictions.
// - Examples whose target is `ignore_index` do not count.
// - InvalidArgument, with both shapes or the value: for other shapes, a target that is no class.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ddp/metrics/metric.h"

namespace ddp::metrics {

// That of torch's cross_entropy.
inline constexpr int64_t kIgnoreIndex = -100;

struct AccuracyOptions {
  int64_t k = 1;  // the target is among the k classes of the largest scores
  int64_t ignore_index = kIgnoreIndex;
};

// The share of examples that are recognised: "accuracy", or "accuracy_top5" for k = 5. NaN without
// examples. InvalidArgument if there are fewer than k classes. Predicted classes: for k = 1 only.
class Accuracy final : public Metric {
 public:
  explicit Accuracy(const AccuracyOptions& options = {});
  // Under another name.
  Accuracy(const AccuracyOptions& options, std::string name);

  std::map<std::string, double> Values() const override;

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override;

  const AccuracyOptions options_;
  at::Tensor& counts_;  // int64 [2]: correct, all
};

// Counts how often examples of each class are taken for which. Has no values for logs, but a table.
// Memory: 8 · classes² bytes.
class ConfusionMatrix final : public Metric {
 public:
  // `class_names`: for the table; empty: their numbers.
  explicit ConfusionMatrix(int64_t num_classes, std::vector<std::string> class_names = {},
                           int64_t ignore_index = kIgnoreIndex);

  // int64 [classes, classes + 1]: row: target, column: prediction; the last: no prediction. A copy.
  at::Tensor Counts() const;
  std::map<std::string, double> Values() const override { return {}; }
  // Precision, recall, F1 and number of examples of each class, their means as of F1, and the
  // accuracy. "-" where there is nothing to divide by, which counts as 0 in the means.
  std::string Table() const override;

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override;

  const int64_t num_classes_;
  const std::vector<std::string> class_names_;
  const int64_t ignore_index_;
  at::Tensor& counts_;
};

// F1 of a class is 2·TP / (2·TP + FP + FN), with TP, FP and FN the numbers of its examples that are
// recognised, of others that are taken for it, and of its examples that are not recognised. Values:
// - "f1_macro": the mean over the classes, without those that occur neither as target nor as
//   prediction, of which there is no F1 (as torchmetrics has it);
// - "f1_weighted": the mean over the classes, weighted by their examples;
// - "f1_micro": of the sums of TP, FP and FN over the classes.
// NaN without examples.
class F1 final : public Metric {
 public:
  explicit F1(int64_t num_classes, int64_t ignore_index = kIgnoreIndex, std::string name = "f1");

  std::map<std::string, double> Values() const override;

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override;

  const int64_t num_classes_;
  const int64_t ignore_index_;
  at::Tensor& counts_;  // int64 [3, classes]: TP, predictions (TP + FP), targets (TP + FN)
};

// Area under the ROC curve of two classes: the probability that an example of class 1 has a larger
// score than one of class 0, where equal scores count half (Mann and Whitney's U / (n1·n0)). Exact:
// no thresholds. NaN if one of the classes has no example, and if a score is NaN.
//
// Update(output, target): scores [n] or [n, 1] of class 1, or [n, 2], logits or
// probabilities of both, of which the difference counts; targets of the same number: 0 or 1, of any
// dtype.
//
// Memory: a score, 4 bytes for dtypes up to float and else 8, and a target of one byte for each
// example: of this rank, and from a reduction on, of all ranks on each.
class Auc final : public Metric {
 public:
  explicit Auc(int64_t ignore_index = kIgnoreIndex, std::string name = "auc");

  std::map<std::string, double> Values() const override;

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override;

  const int64_t ignore_index_;
  Rows& scores_;
  Rows& targets_;  // uint8
};

// exp of the mean cross entropy of the targets, exp(-1/n Σ log softmax(output)[target]), over all n
// tokens: those of a long text count more than those of a short one. NaN without tokens. The logits
// are [n, classes, …]; log_softmax is computed in float, in double for logits in double, and added
// up in double.
class Perplexity final : public Metric {
 public:
  explicit Perplexity(int64_t ignore_index = kIgnoreIndex, std::string name = "perplexity");

  std::map<std::string, double> Values() const override;

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override;

  const int64_t ignore_index_;
  at::Tensor& loss_;    // double [1]
  at::Tensor& tokens_;  // int64 [1]
};

// The metrics above by name, for options: "auc", "confusion", "f1", "perplexity", and "top5" or
// another number, whose value is "accuracy_top5".
// InvalidArgument: another name; the message goes on after it ("is none of …") and names the
// nearest. Thread-safe.
absl::Status CheckMetricName(absl::string_view name);
// `num_classes`: that of the outputs. InvalidArgument: as above; top5 of 3 classes; auc of other
// than two, or one if the outputs are the scores of class 1 alone.
absl::StatusOr<std::shared_ptr<Metric>> MakeMetric(absl::string_view name, int64_t num_classes);

}  // namespace ddp::metrics
