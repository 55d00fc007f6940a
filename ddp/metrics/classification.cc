#include "ddp/metrics/classification.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/option_list.h"
#include "base/status.h"

namespace ddp::metrics {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The examples of a batch that count, without further dimensions.
struct Examples {
  at::Tensor target;     // int64 [m]
  at::Tensor scores;     // [m, classes], or
  at::Tensor predicted;  // int64 [m]
};

// Targets as int64, of the same shape.
absl::StatusOr<at::Tensor> ToClasses(const at::Tensor& target) {
  if (target.is_floating_point() && !target.floor().eq(target).all().item<bool>()) {
    return absl::InvalidArgumentError(absl::StrCat("targets must be classes, but ", ShapeOf(target),
                                                   " has numbers that are not whole"));
  }
  return target.to(at::kLong);
}

// InvalidArgument unless each element is from 0 to num_classes - 1.
absl::Status CheckClasses(const char* what, const at::Tensor& classes, int64_t num_classes) {
  if (classes.numel() == 0) return absl::OkStatus();
  for (const int64_t extreme : {classes.min().item<int64_t>(), classes.max().item<int64_t>()}) {
    if (extreme >= 0 && extreme < num_classes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a ", what, " is ", extreme, ", but there are ", num_classes, " classes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Examples> ExamplesOf(const at::Tensor& output, const at::Tensor& target,
                                    std::optional<int64_t> num_classes, int64_t ignore_index) {
  const auto differ = [&](const std::string& problem) {
    return absl::InvalidArgumentError(absl::StrCat("outputs ", ShapeOf(output), " and targets ",
                                                   ShapeOf(target), " do not fit: ", problem));
  };
  if (!output.defined() || !target.defined()) return differ("both are needed");
  Examples all;
  if (output.sizes() == target.sizes() && at::isIntegralType(output.scalar_type(), true)) {
    all.predicted = output.reshape({-1}).to(at::kLong);
  } else if (output.dim() == target.dim() + 1) {
    std::vector<int64_t> rest = output.sizes().vec();
    rest.erase(rest.begin() + std::min<int64_t>(1, output.dim() - 1));
    if (rest != target.sizes()) return differ("the classes are dimension 1 of the outputs");
    const int64_t classes = output.size(std::min<int64_t>(1, output.dim() - 1));
    if (classes == 0 || classes != num_classes.value_or(classes)) {
      return differ(absl::StrCat("there are ", classes, " classes",
                                 num_classes ? absl::StrCat(", not ", *num_classes) : ""));
    }
    num_classes = classes;
    all.scores =
        output.dim() == 1 ? output.unsqueeze(0) : output.movedim(1, -1).reshape({-1, classes});
  } else {
    return differ(
        "outputs are scores [n, classes, …] of targets [n, …], or predicted classes, "
        "integers of the targets' shape");
  }
  DDP_ASSIGN_OR_RETURN(all.target, ToClasses(target.reshape({-1})));
  const at::Tensor counted = all.target.ne(ignore_index);
  if (!counted.all().item<bool>()) {
    const at::Tensor kept = counted.nonzero().squeeze(1);
    for (at::Tensor* each : {&all.target, &all.scores, &all.predicted}) {
      if (each->defined()) *each = each->index_select(0, kept.to(each->device()));
    }
  }
  if (num_classes) {
    DDP_RETURN_IF_ERROR(CheckClasses("target", all.target, *num_classes));
    if (all.predicted.defined()) {
      DDP_RETURN_IF_ERROR(CheckClasses("prediction", all.predicted, *num_classes));
    }
  }
  return all;
}

// On the CPU: int64 [m]; the number of classes for those without a prediction.
at::Tensor Predictions(const Examples& examples) {
  if (examples.predicted.defined()) return examples.predicted.cpu();
  const at::Tensor& scores = examples.scores;
  return scores.argmax(1).masked_fill(scores.isnan().any(1), scores.size(1)).cpu();
}

struct ClassCounts {
  double recognised, predicted, targets;

  bool occurs() const { return predicted + targets > 0; }
  double precision() const { return recognised / predicted; }
  double recall() const { return recognised / targets; }
  double f1() const { return 2 * recognised / (predicted + targets); }
};

// Of int64 [3, classes].
std::vector<ClassCounts> CountsByClass(const at::Tensor& counts) {
  const at::Tensor rows = counts.contiguous();
  const int64_t* values = rows.const_data_ptr<int64_t>();
  const int64_t classes = rows.size(1);
  const auto at = [&](int64_t row, int64_t i) {
    return static_cast<double>(values[row * classes + i]);
  };
  std::vector<ClassCounts> all;
  for (int64_t i = 0; i < classes; ++i) all.push_back({at(0, i), at(1, i), at(2, i)});
  return all;
}

ClassCounts Sum(const std::vector<ClassCounts>& classes) {
  ClassCounts sum = {};
  for (const ClassCounts& each : classes) {
    sum.recognised += each.recognised;
    sum.predicted += each.predicted;
    sum.targets += each.targets;
  }
  return sum;
}

// Means of a value over the classes; where it does not exist, it counts as 0.
struct Means {
  double macro, weighted;
};
Means MeansOf(const std::vector<ClassCounts>& classes, double (ClassCounts::*value)() const) {
  double sum = 0, weighted = 0, occurring = 0, targets = 0;
  for (const ClassCounts& each : classes) {
    if (!each.occurs()) continue;
    const double own = (each.*value)();
    const double counted = std::isnan(own) ? 0 : own;
    sum += counted;
    occurring += 1;
    weighted += counted * each.targets;
    targets += each.targets;
  }
  return {sum / occurring, weighted / targets};
}

std::string Cell(double value) {
  return std::isnan(value) ? absl::StrFormat("%11s", "-") : absl::StrFormat("%11.4f", value);
}

}  // namespace

Accuracy::Accuracy(const AccuracyOptions& options)
    : Accuracy(options, options.k == 1 ? "accuracy" : absl::StrCat("accuracy_top", options.k)) {}

Accuracy::Accuracy(const AccuracyOptions& options, std::string name)
    : Metric(std::move(name)), options_(options), counts_(AddSums(at::zeros({2}, at::kLong))) {}

std::map<std::string, double> Accuracy::Values() const {
  const int64_t* counts = counts_.const_data_ptr<int64_t>();
  return {{name(), static_cast<double>(counts[0]) / static_cast<double>(counts[1])}};
}

absl::Status Accuracy::Accumulate(const at::Tensor& output, const at::Tensor& target) {
  DDP_ASSIGN_OR_RETURN(const Examples examples,
                       ExamplesOf(output, target, std::nullopt, options_.ignore_index));
  at::Tensor correct;
  if (examples.predicted.defined()) {
    if (options_.k != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("needs the scores [n, classes, …], but the outputs are ", ShapeOf(output)));
    }
    correct = examples.predicted.eq(examples.target);
  } else {
    const int64_t classes = examples.scores.size(1);
    if (options_.k < 1 || options_.k > classes) {
      return absl::InvalidArgumentError(
          absl::StrCat("k=", options_.k, " of ", classes, " classes: k is from 1 to their number"));
    }
    // How many classes come before the target's.
    const at::Tensor own = examples.target.unsqueeze(1);
    const at::Tensor score = examples.scores.gather(1, own);
    const at::Tensor lower = at::arange(classes, own.options()).unsqueeze(0).lt(own);
    const at::Tensor before =
        examples.scores.gt(score).logical_or(examples.scores.eq(score).logical_and(lower));
    correct =
        before.sum(1).lt(options_.k).logical_and(examples.scores.isnan().any(1).logical_not());
  }
  int64_t* counts = counts_.mutable_data_ptr<int64_t>();
  counts[0] += correct.sum().item<int64_t>();
  counts[1] += correct.numel();
  return absl::OkStatus();
}

ConfusionMatrix::ConfusionMatrix(int64_t num_classes, std::vector<std::string> class_names,
                                 int64_t ignore_index)
    : Metric("confusion_matrix"),
      num_classes_(num_classes),
      class_names_(std::move(class_names)),
      ignore_index_(ignore_index),
      counts_(AddSums(at::zeros({num_classes, num_classes + 1}, at::kLong))) {}

at::Tensor ConfusionMatrix::Counts() const { return counts_.clone(); }

absl::Status ConfusionMatrix::Accumulate(const at::Tensor& output, const at::Tensor& target) {
  DDP_ASSIGN_OR_RETURN(const Examples examples,
                       ExamplesOf(output, target, num_classes_, ignore_index_));
  const at::Tensor cell = examples.target.cpu().mul(num_classes_ + 1).add(Predictions(examples));
  counts_.add_(cell.bincount({}, counts_.numel()).view_as(counts_));
  return absl::OkStatus();
}

std::string ConfusionMatrix::Table() const {
  const at::Tensor known = counts_.narrow(1, 0, num_classes_);
  const std::vector<ClassCounts> classes =
      CountsByClass(at::stack({known.diagonal(), known.sum(0), counts_.sum(1)}));
  const auto name = [&](size_t i) {
    return i < class_names_.size() ? class_names_[i] : absl::StrCat(i);
  };
  size_t width = std::string("weighted mean").size();
  for (size_t i = 0; i < classes.size(); ++i) width = std::max(width, name(i).size());
  std::string table;
  const auto add = [&](const std::string& title, const std::string& cells, double examples) {
    absl::StrAppendFormat(&table, "%-*s%s%11d\n", width, title, cells,
                          static_cast<int64_t>(examples));
  };
  absl::StrAppendFormat(&table, "%-*s%11s%11s%11s%11s\n", width, "class", "precision", "recall",
                        "f1", "examples");
  for (size_t i = 0; i < classes.size(); ++i) {
    const ClassCounts& each = classes[i];
    add(name(i), Cell(each.precision()) + Cell(each.recall()) + Cell(each.f1()), each.targets);
  }
  const Means precision = MeansOf(classes, &ClassCounts::precision);
  const Means recall = MeansOf(classes, &ClassCounts::recall);
  const Means f1 = MeansOf(classes, &ClassCounts::f1);
  const ClassCounts sum = Sum(classes);
  add("mean", Cell(precision.macro) + Cell(recall.macro) + Cell(f1.macro), sum.targets);
  add("weighted mean", Cell(precision.weighted) + Cell(recall.weighted) + Cell(f1.weighted),
      sum.targets);
  add("accuracy", absl::StrFormat("%33s", Cell(sum.recall())), sum.targets);
  return table;
}

F1::F1(int64_t num_classes, int64_t ignore_index, std::string name)
    : Metric(std::move(name)),
      num_classes_(num_classes),
      ignore_index_(ignore_index),
      counts_(AddSums(at::zeros({3, num_classes}, at::kLong))) {}

absl::Status F1::Accumulate(const at::Tensor& output, const at::Tensor& target) {
  DDP_ASSIGN_OR_RETURN(const Examples examples,
                       ExamplesOf(output, target, num_classes_, ignore_index_));
  const at::Tensor predicted = Predictions(examples), targets = examples.target.cpu();
  const auto add = [&](int64_t row, const at::Tensor& classes) {
    // The last element counts those without a prediction.
    counts_[row].add_(classes.bincount({}, num_classes_ + 1).narrow(0, 0, num_classes_));
  };
  add(0, targets.masked_select(predicted.eq(targets)));
  add(1, predicted);
  add(2, targets);
  return absl::OkStatus();
}

std::map<std::string, double> F1::Values() const {
  const std::vector<ClassCounts> classes = CountsByClass(counts_);
  const ClassCounts sum = Sum(classes);
  const Means means = MeansOf(classes, &ClassCounts::f1);
  return {{absl::StrCat(name(), "_macro"), means.macro},
          {absl::StrCat(name(), "_weighted"), means.weighted},
          {absl::StrCat(name(), "_micro"), sum.f1()}};
}

Auc::Auc(int64_t ignore_index, std::string name)
    : Metric(std::move(name)),
      ignore_index_(ignore_index),
      scores_(AddRows()),
      targets_(AddRows()) {}

absl::Status Auc::Accumulate(const at::Tensor& output, const at::Tensor& target) {
  const auto differ = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "outputs ", ShapeOf(output), " and targets ", ShapeOf(target),
        " do not fit: outputs are scores of class 1, [n] or [n, 1], or of both classes, [n, 2]"));
  };
  if (!output.defined() || !target.defined()) return differ();
  const int64_t n = target.numel();
  at::Tensor scores;
  if (output.dim() == 2 && output.size(0) == n && output.size(1) == 2) {
    const at::Tensor both = output.to(at::kDouble);
    scores = both.select(1, 1).sub(both.select(1, 0));
  } else if (output.sizes() == target.sizes() ||
             (output.numel() == n && output.dim() <= 2 && output.size(0) == n)) {
    const bool is_float = output.is_floating_point() && output.scalar_type() != at::kDouble;
    scores = output.reshape({-1}).to(is_float ? at::kFloat : at::kDouble);
  } else {
    return differ();
  }
  DDP_ASSIGN_OR_RETURN(at::Tensor classes, ToClasses(target.reshape({-1})));
  const at::Tensor counted = classes.ne(ignore_index_).nonzero().squeeze(1);
  classes = classes.index_select(0, counted);
  DDP_RETURN_IF_ERROR(CheckClasses("target", classes, 2));
  scores_.Append(scores.index_select(0, counted.to(scores.device())));
  targets_.Append(classes.to(at::kByte));
  return absl::OkStatus();
}

std::map<std::string, double> Auc::Values() const {
  const at::Tensor scores = scores_.All().to(at::kDouble);
  const auto value = [&](double auc) { return std::map<std::string, double>{{name(), auc}}; };
  if (scores.isnan().any().item<bool>()) return value(kNaN);
  const auto [sorted, order] = scores.sort();
  const at::Tensor targets = targets_.All().to(at::kByte).index_select(0, order);
  const double* score = sorted.const_data_ptr<double>();
  const uint8_t* target = targets.const_data_ptr<uint8_t>();
  // Twice the number of pairs in which class 1 has the larger score. Exact up to 2^62.
  int64_t twice = 0, positives = 0, negatives = 0;
  for (int64_t begin = 0, end = 0; begin < scores.numel(); begin = end) {
    int64_t equal[2] = {0, 0};
    for (; end < scores.numel() && score[end] == score[begin]; ++end) ++equal[target[end]];
    twice += equal[1] * (2 * negatives + equal[0]);
    negatives += equal[0];
    positives += equal[1];
  }
  return value(static_cast<double>(twice) /
               (2 * static_cast<double>(positives) * static_cast<double>(negatives)));
}

Perplexity::Perplexity(int64_t ignore_index, std::string name)
    : Metric(std::move(name)),
      ignore_index_(ignore_index),
      loss_(AddSums(at::zeros({1}, at::kDouble))),
      tokens_(AddSums(at::zeros({1}, at::kLong))) {}

absl::Status Perplexity::Accumulate(const at::Tensor& output, const at::Tensor& target) {
  DDP_ASSIGN_OR_RETURN(const Examples tokens,
                       ExamplesOf(output, target, std::nullopt, ignore_index_));
  if (!tokens.scores.defined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("needs logits [n, classes, …], but the outputs are ", ShapeOf(output)));
  }
  const bool is_double = tokens.scores.scalar_type() == at::kDouble;
  const at::Tensor log_probabilities =
      tokens.scores.log_softmax(1, is_double ? at::kDouble : at::kFloat);
  const at::Tensor sum = log_probabilities.gather(1, tokens.target.unsqueeze(1)).sum(at::kDouble);
  loss_.sub_(sum.cpu());
  tokens_.add_(tokens.target.numel());
  return absl::OkStatus();
}

std::map<std::string, double> Perplexity::Values() const {
  const double loss = loss_.item<double>();
  return {{name(), std::exp(loss / static_cast<double>(tokens_.item<int64_t>()))}};
}

namespace {

// The number in "top5".
std::optional<int64_t> TopK(absl::string_view name) {
  int64_t k = 0;
  if (!absl::ConsumePrefix(&name, "top") || !absl::SimpleAtoi(name, &k) || k < 1) {
    return std::nullopt;
  }
  return k;
}

}  // namespace

absl::Status CheckMetricName(absl::string_view name) {
  const std::vector<std::string> names = {"auc", "confusion", "f1", "perplexity", "top5"};
  if (TopK(name) || std::find(names.begin(), names.end(), name) != names.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("is none of ", absl::StrJoin(names, ", "),
                                                 " (or another number)", DidYouMean(name, names)));
}

absl::StatusOr<std::shared_ptr<Metric>> MakeMetric(absl::string_view name, int64_t num_classes) {
  const absl::Status known = CheckMetricName(name);
  if (!known.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("metric '", name, "' ", known.message()));
  }
  const std::optional<int64_t> k = TopK(name);
  if ((k && *k > num_classes) || (name == "auc" && num_classes > 2)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metric '", name, "' is not one of outputs of ", num_classes, " classes",
        k ? "" : ": it is the area under the curve of two; make others with Task::metrics"));
  }
  if (k)
    return std::make_shared<Accuracy>(AccuracyOptions{.k = *k}, absl::StrCat("accuracy_", name));
  if (name == "auc") return std::make_shared<Auc>();
  if (name == "confusion") return std::make_shared<ConfusionMatrix>(num_classes);
  if (name == "f1") return std::make_shared<F1>(num_classes);
  return std::make_shared<Perplexity>();
}

}  // namespace ddp::metrics
