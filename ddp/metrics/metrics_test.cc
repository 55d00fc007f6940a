// Metrics: their values by formulas written here, the same over ranks, and odd input.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/metrics/classification.h"
#include "ddp/metrics/mean.h"
#include "ddp/metrics/metric.h"
#include "ddp/nets_testing.h"

namespace ddp::metrics {
namespace {

using absl::StrContains;
using MetricList = std::vector<std::unique_ptr<Metric>>;
using Values = std::map<std::string, double>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// docs/metrics.md shows it.
class R2 final : public metrics::Metric {
 public:
  R2() : Metric("r2"), sums_(AddSums(at::zeros({4}, at::kDouble))) {}

  std::map<std::string, double> Values() const override {
    const double n = sums_[0].item<double>(), sum = sums_[1].item<double>();
    const double squares = sums_[2].item<double>(), residual = sums_[3].item<double>();
    return {{name(), 1 - residual / (squares - sum * sum / n)}};
  }

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor& target) override {
    if (output.sizes() != target.sizes()) {
      return absl::InvalidArgumentError(absl::StrCat("outputs ", metrics::ShapeOf(output),
                                                     ", but targets ", metrics::ShapeOf(target)));
    }
    const at::Tensor y = target.to(at::kDouble), f = output.to(at::kDouble);
    sums_[0] += y.numel();
    sums_[1] += y.sum();
    sums_[2] += y.square().sum();
    sums_[3] += (y - f).square().sum();
    return absl::OkStatus();
  }

  at::Tensor& sums_;  // n, Σ y, Σ y², Σ (y - f)²
};

// Examples of four classes. Scores are quarters, so that there are ties, and sums of them exact.
struct Data {
  at::Tensor scores;   // float [n, 4]
  at::Tensor classes;  // int64 [n]; the last class is rare
};

Data MakeData(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> scores;
  std::vector<int64_t> classes;
  for (int64_t i = 0; i < n; ++i) {
    classes.push_back(static_cast<int64_t>(random() % 40) / 13);
    for (int64_t c = 0; c < 4; ++c) {
      scores.push_back(static_cast<float>(random() % 9) / 4 + (c == classes.back() ? 0.5F : 0));
    }
  }
  return {at::tensor(scores).view({n, 4}), at::tensor(classes, at::kLong)};
}

MetricList AllMetrics() {
  MetricList all;
  all.push_back(std::make_unique<Accuracy>());
  all.push_back(std::make_unique<Accuracy>(AccuracyOptions{.k = 2}));
  all.push_back(std::make_unique<ConfusionMatrix>(4));
  all.push_back(std::make_unique<F1>(4));
  all.push_back(std::make_unique<Auc>());
  all.push_back(std::make_unique<Perplexity>());
  all.push_back(std::make_unique<Mean>());
  all.push_back(std::make_unique<R2>());
  return all;
}

// The examples from `begin` to `end`.
void Add(MetricList& all, const Data& data, int64_t begin, int64_t end) {
  const at::Tensor scores = data.scores.slice(0, begin, end);
  const at::Tensor classes = data.classes.slice(0, begin, end);
  for (const std::unique_ptr<Metric>& metric : all) {
    absl::Status added;
    if (metric->name() == "auc") {
      added = metric->Update(scores.select(1, 1), classes.eq(1));
    } else if (metric->name() == "mean") {
      added = metric->Update(scores.select(1, 0), classes.add(1));
    } else if (metric->name() == "r2") {
      added = metric->Update(scores.select(1, 0), classes);
    } else {
      added = metric->Update(scores, classes);
    }
    ASSERT_TRUE(added.ok()) << added;
  }
}

std::vector<Metric*> Pointers(const MetricList& all) {
  std::vector<Metric*> pointers;
  for (const std::unique_ptr<Metric>& metric : all) pointers.push_back(metric.get());
  return pointers;
}

// Of one rank.
Values ValuesOf(const Data& data, int64_t batch) {
  MetricList all = AllMetrics();
  for (int64_t i = 0; i < data.classes.numel(); i += batch) {
    Add(all, data, i, std::min(i + batch, data.classes.numel()));
  }
  const auto values = ReduceMetrics(nullptr, Pointers(all));
  EXPECT_TRUE(values.ok()) << values.status();
  return *values;
}

// Bit for bit, but for perplexity, whose sum is not of integers.
void ExpectSame(const Values& actual, const Values& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_EQ(actual.count(name), 1) << name;
    if (name == "perplexity" || std::isnan(value)) {
      EXPECT_EQ(std::isnan(actual.at(name)), std::isnan(value)) << name;
      if (std::isnan(value)) continue;
      EXPECT_NEAR(actual.at(name), value, 1e-12 * value) << name;
    } else {
      EXPECT_EQ(actual.at(name), value) << name;
    }
  }
}

TEST(MetricsTest, AnyDistributionOverRanksGivesTheValuesOfOneRank) {
  const Data data = MakeData(101, 7);
  const Values expected = ValuesOf(data, 101);
  EXPECT_EQ(expected.size(), 9);
  ExpectSame(ValuesOf(data, 8), expected);
  // Bounds of the ranks' shares: also empty ones, first and last.
  for (const std::vector<int64_t>& bounds : std::vector<std::vector<int64_t>>{
           {0, 30, 101}, {0, 0, 101}, {0, 1, 97, 101}, {0, 60, 60, 101}, {0, 101, 101, 101}}) {
    const int ranks = static_cast<int>(bounds.size()) - 1;
    SCOPED_TRACE(absl::StrJoin(bounds, ","));
    RunRanks(ranks, [&](int rank, const GroupPtr& group) {
      MetricList all = AllMetrics();
      for (int repeat = 0; repeat < 2; ++repeat) {
        for (int64_t i = bounds[rank]; i < bounds[rank + 1]; i += 7 + rank) {
          Add(all, data, i, std::min(i + 7 + rank, bounds[rank + 1]));
        }
        const auto values = ReduceMetrics(group, Pointers(all));
        ASSERT_TRUE(values.ok()) << values.status();
        ExpectSame(*values, expected);
        for (const std::unique_ptr<Metric>& metric : all) metric->Reset();
      }
    });
  }
}

TEST(MetricsTest, ValuesAreThoseOfTheirFormulas) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    const int64_t n = 57;
    const Data data = MakeData(n, seed);
    const Values values = ValuesOf(data, 10);
    const auto score = [&](int64_t i, int64_t c) { return data.scores[i][c].item<double>(); };
    double correct = 0, correct2 = 0, loss = 0;
    double weighted = 0, weights = 0;
    double tp[4] = {}, fp[4] = {}, fn[4] = {};
    std::vector<int64_t> target;
    for (int64_t i = 0; i < n; ++i) {
      target.push_back(data.classes[i].item<int64_t>());
      std::vector<int64_t> order = {0, 1, 2, 3};
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t a, int64_t b) { return score(i, a) > score(i, b); });
      correct += order[0] == target[i];
      correct2 += order[0] == target[i] || order[1] == target[i];
      if (order[0] == target[i]) {
        ++tp[target[i]];
      } else {
        ++fp[order[0]];
        ++fn[target[i]];
      }
      double exponentials = 0;
      for (int64_t c = 0; c < 4; ++c) exponentials += std::exp(score(i, c));
      loss += std::log(exponentials) - score(i, target[i]);
      weighted += score(i, 0) * static_cast<double>(target[i] + 1);
      weights += static_cast<double>(target[i] + 1);
    }
    EXPECT_EQ(values.at("accuracy"), correct / n);
    EXPECT_EQ(values.at("accuracy_top2"), correct2 / n);
    EXPECT_NEAR(values.at("perplexity"), std::exp(loss / n), 1e-5);
    EXPECT_DOUBLE_EQ(values.at("mean"), weighted / weights);

    double macro = 0, by_weight = 0, sums[3] = {};
    for (int c = 0; c < 4; ++c) {
      const double f1 = 2 * tp[c] / (2 * tp[c] + fp[c] + fn[c]);
      macro += f1 / 4;
      by_weight += f1 * (tp[c] + fn[c]) / n;
      sums[0] += tp[c];
      sums[1] += fp[c];
      sums[2] += fn[c];
    }
    EXPECT_NEAR(values.at("f1_macro"), macro, 1e-14);
    EXPECT_NEAR(values.at("f1_weighted"), by_weight, 1e-14);
    EXPECT_NEAR(values.at("f1_micro"), 2 * sums[0] / (2 * sums[0] + sums[1] + sums[2]), 1e-14);

    double larger = 0, pairs = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        if (target[i] != 1 || target[j] == 1) continue;
        ++pairs;
        larger += score(i, 1) > score(j, 1) ? 1 : score(i, 1) == score(j, 1) ? 0.5 : 0;
      }
    }
    EXPECT_EQ(values.at("auc"), larger / pairs);

    const at::Tensor y = data.classes.to(at::kDouble), f = data.scores.select(1, 0);
    EXPECT_NEAR(values.at("r2"),
                (1 - (y - f).square().sum() / (y - y.mean()).square().sum()).item<double>(), 1e-12);
  }
}

TEST(MetricsTest, ConfusionMatrixHasATableByClass) {
  ConfusionMatrix confusion(4, {"cat", "dog", "a long name of one", "never"});
  const at::Tensor predicted = at::tensor({0, 0, 1, 1, 1, 2}, at::kLong);
  const at::Tensor target = at::tensor({0, 1, 1, 1, 0, 0}, at::kLong);
  ASSERT_TRUE(confusion.Update(predicted, target).ok());
  const at::Tensor counts = confusion.Counts();
  EXPECT_EQ(counts.sizes(), (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(counts[0][1].item<int64_t>(), 1);
  EXPECT_EQ(counts[1][1].item<int64_t>(), 2);
  EXPECT_EQ(confusion.Table(),
            "class               precision     recall         f1   examples\n"
            "cat                    0.5000     0.3333     0.4000          3\n"
            "dog                    0.6667     0.6667     0.6667          3\n"
            "a long name of one     0.0000          -     0.0000          0\n"
            "never                       -          -          -          0\n"
            "mean                   0.3889     0.3333     0.3556          6\n"
            "weighted mean          0.5833     0.5000     0.5333          6\n"
            "accuracy                                     0.5000          6\n");
}

TEST(MetricsTest, NothingIsNaN) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    MetricList all = AllMetrics();
    // One rank has an empty batch, the other none.
    if (rank == 1) Add(all, {at::zeros({0, 4}), at::zeros({0}, at::kLong)}, 0, 0);
    const auto values = ReduceMetrics(group, Pointers(all));
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_EQ(values->size(), 9);
    for (const auto& [name, value] : *values) EXPECT_TRUE(std::isnan(value)) << name;
  });
  // A curve of one class.
  Auc auc;
  ASSERT_TRUE(auc.Update(at::ones({3}), at::ones({3})).ok());
  EXPECT_TRUE(std::isnan(auc.Values().at("auc")));
}

TEST(MetricsTest, AScoreThatIsNaNIsNoPrediction) {
  const at::Tensor scores = at::tensor({1., 2., kNaN, 0., 3., 1.}).view({3, 2});
  const at::Tensor target = at::tensor({1, 0, 0}, at::kLong);
  Accuracy accuracy;
  ASSERT_TRUE(accuracy.Update(scores, target).ok());
  EXPECT_EQ(accuracy.Values().at("accuracy"), 2. / 3);
  Accuracy all({.k = 2});
  ASSERT_TRUE(all.Update(scores, target).ok());
  EXPECT_EQ(all.Values().at("accuracy_top2"), 2. / 3);
  ConfusionMatrix confusion(2);
  ASSERT_TRUE(confusion.Update(scores, target).ok());
  EXPECT_TRUE(confusion.Counts().equal(at::tensor({1, 0, 1, 0, 1, 0}, at::kLong).view({2, 3})));
  F1 f1(2);
  ASSERT_TRUE(f1.Update(scores, target).ok());
  EXPECT_DOUBLE_EQ(f1.Values().at("f1_macro"), (2. / 3 + 1) / 2);
  EXPECT_DOUBLE_EQ(f1.Values().at("f1_micro"), 4. / 5);
  Auc auc;
  ASSERT_TRUE(auc.Update(scores, target).ok());
  EXPECT_TRUE(std::isnan(auc.Values().at("auc")));
}

TEST(MetricsTest, TargetsOfAnyDtypeAndIgnoredOnes) {
  const at::Tensor scores = at::tensor({1., 2.5, 0., 1., 3., 1., 4., 2.}).view({4, 2});
  const at::Tensor target = at::tensor({1, 0, -100, 0}, at::kLong);
  for (const at::ScalarType type : {at::kLong, at::kInt, at::kFloat, at::kDouble, at::kShort}) {
    Accuracy accuracy;
    ASSERT_TRUE(accuracy.Update(scores, target.to(type)).ok());
    EXPECT_EQ(accuracy.Values().at("accuracy"), 2. / 3) << type;
    Auc auc;
    ASSERT_TRUE(auc.Update(scores, target.to(type)).ok());
    EXPECT_EQ(auc.Values().at("auc"), 1) << type;
    ConfusionMatrix confusion(2);
    ASSERT_TRUE(confusion.Update(scores.to(at::kHalf), target.to(type)).ok());
    EXPECT_EQ(confusion.Counts().sum().item<int64_t>(), 3);
  }
  // Further dimensions, as of a text or a segmentation: the mean over all tokens.
  Perplexity perplexity;
  ASSERT_TRUE(
      perplexity
          .Update(at::zeros({2, 5, 3}), at::tensor({0, 1, 2, 3, 4, -100}, at::kLong).view({2, 3}))
          .ok());
  EXPECT_NEAR(perplexity.Values().at("perplexity"), 5, 1e-6);
  // Logits in double stay in double.
  perplexity.Reset();
  ASSERT_TRUE(
      perplexity.Update(at::tensor({0.1, 0.7}).view({1, 2}), at::zeros({1}, at::kLong)).ok());
  EXPECT_NEAR(perplexity.Values().at("perplexity"), 1 + std::exp(0.6), 1e-13);
  F1 f1(2);
  ASSERT_TRUE(f1.Update(scores.view({2, 2, 2}), at::zeros({2, 2}, at::kLong)).ok());
  // One example without a batch dimension.
  ASSERT_TRUE(f1.Update(scores[0], at::ones({}, at::kLong)).ok());
}

TEST(MetricsTest, IgnoredTargetsOfPredictedClasses) {
  const at::Tensor predicted = at::tensor({1, 0, 1, 0}, at::kLong);
  const at::Tensor target = at::tensor({1, 0, -100, 1}, at::kLong);
  Accuracy accuracy;
  const absl::Status added = accuracy.Update(predicted, target);
  ASSERT_TRUE(added.ok()) << added;
  EXPECT_EQ(accuracy.Values().at("accuracy"), 2. / 3);
  ConfusionMatrix confusion(2);
  ASSERT_TRUE(confusion.Update(predicted, target).ok());
  EXPECT_EQ(confusion.Counts().sum().item<int64_t>(), 3);
}

TEST(MetricsTest, WhatDoesNotFitIsAnErrorWithBothShapes) {
  const auto refused = [](Metric& metric, const at::Tensor& output, const at::Tensor& target,
                          const std::vector<std::string>& words) {
    const absl::Status status = metric.Update(output, target);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& word : words) {
      EXPECT_TRUE(StrContains(status.message(), word)) << status << "\nlacks " << word;
    }
  };
  const at::Tensor three = at::zeros({3}, at::kLong);
  Accuracy accuracy;
  refused(accuracy, at::zeros({4, 2}), three, {"accuracy: ", "Float [4, 2]", "Long [3]"});
  refused(accuracy, at::zeros({3}), three, {"Float [3]", "Long [3]"});
  refused(accuracy, at::zeros({3, 0}), three, {"0 classes"});
  refused(accuracy, at::zeros({3, 2}), {}, {"none"});
  refused(accuracy, at::zeros({3, 2}), three.add(2), {"a target is 2, but there are 2 classes"});
  refused(accuracy, at::zeros({3, 2}), three.sub(1), {"a target is -1"});
  refused(accuracy, at::zeros({3, 2}), three.to(at::kFloat).add(0.5), {"not whole"});
  Accuracy top({.k = 3});
  refused(top, at::zeros({3, 2}), three, {"k=3 of 2 classes"});
  refused(top, three, three, {"needs the scores"});
  ConfusionMatrix confusion(2);
  refused(confusion, at::zeros({3, 4}), three, {"there are 4 classes, not 2"});
  refused(confusion, three.add(5), three, {"a prediction is 5"});
  Auc auc;
  refused(auc, at::zeros({3, 3}), three, {"auc: ", "[3, 3]", "[3]"});
  refused(auc, at::zeros({3}), three.add(2), {"a target is 2"});
  Perplexity perplexity;
  refused(perplexity, three, three, {"needs logits"});
  Mean mean("error");
  refused(mean, at::zeros({3}), at::zeros({2}), {"error: ", "[2]", "[3]"});
}

// Adds up numbers that a double does not hold.
class Large final : public Metric {
 public:
  explicit Large(std::string name = "large")
      : Metric(std::move(name)), sum_(AddSums(at::zeros({3}, at::kLong))) {}
  std::map<std::string, double> Values() const override { return {{name(), 0}}; }
  const at::Tensor& sum() const { return sum_; }

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor&) override {
    sum_ += output;
    return absl::OkStatus();
  }
  at::Tensor& sum_;
};

TEST(MetricsTest, IntegersAreAddedUpExactly) {
  const int64_t odd = (int64_t{1} << 60) + 1;
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    Large large;
    Mean mean;  // doubles in the same all-reduce
    ASSERT_TRUE(large.Update(at::tensor({odd + rank, -odd - rank, int64_t{-1}}, at::kLong)).ok());
    ASSERT_TRUE(mean.Add(0.5, rank).ok());
    const auto values = ReduceMetrics(group, {&large, &mean});
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_TRUE(large.sum().equal(at::tensor({3 * odd + 3, -3 * odd - 3, int64_t{-3}}, at::kLong)))
        << large.sum();
    EXPECT_EQ(values->at("mean"), 0.5);
  });
}

TEST(MetricsTest, RanksThatDifferEndTogether) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    const auto expect = [&](std::vector<Metric*> metrics, const std::string& message) {
      const auto values = ReduceMetrics(group, metrics);
      EXPECT_EQ(values.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_TRUE(StrContains(values.status().message(), message)) << values.status();
    };
    ConfusionMatrix four(4), five(5);
    expect({rank == 2 ? &five : &four},
           "rank 0 has confusion_matrix (Long [4, 5]), and rank 2 confusion_matrix (Long [5, 6])");
    Mean mean, reduced;
    if (rank == 1) {
      ASSERT_TRUE(ReduceMetrics(nullptr, {&reduced}).ok());
    }
    expect({rank == 1 ? &reduced : &mean}, "rank 1: mean: its state is that of all ranks");
  });
}

TEST(MetricsTest, StatesAreThoseOfAllRanksUntilReset) {
  Mean mean;
  ASSERT_TRUE(mean.Add(6, 2).ok());
  ASSERT_TRUE(ReduceMetrics(nullptr, {&mean}).ok());
  EXPECT_EQ(mean.Update(at::ones({1})).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(mean.Add(1, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(mean.Values().at("mean"), 3);
  mean.Reset();
  ASSERT_TRUE(mean.Add(1, 1).ok());
  EXPECT_EQ(mean.Values().at("mean"), 1);

  Auc auc;
  for (const float first : {0.9F, 0.1F}) {
    ASSERT_TRUE(auc.Update(at::tensor({first, 0.5F}), at::tensor({0, 1}, at::kLong)).ok());
    EXPECT_EQ(auc.Values().at("auc"), first < 0.5F ? 1 : 0);
    auc.Reset();
  }

  Accuracy one, other;
  EXPECT_TRUE(StrContains(ReduceMetrics(nullptr, {&one, &other}).status().message(),
                          "two of the metrics have a value 'accuracy'"));
}

// What a metric keeps is its own.
TEST(MetricsTest, OutputsMayBeChangedLater) {
  Auc auc;
  at::Tensor scores = at::tensor({0.1F, 0.9F}), target = at::tensor({0, 1}, at::kByte);
  ASSERT_TRUE(auc.Update(scores, target).ok());
  scores.neg_();
  target.fill_(1);
  EXPECT_EQ(auc.Values().at("auc"), 1);
}

// Keeps what it gets.
class Kept final : public Metric {
 public:
  Kept() : Metric("kept"), rows_(AddRows()) {}
  std::map<std::string, double> Values() const override {
    return {{name(), rows_.All().sum().item<double>()}};
  }

 private:
  absl::Status Accumulate(const at::Tensor& output, const at::Tensor&) override {
    rows_.Append(output);
    return absl::OkStatus();
  }
  Rows& rows_;
};

TEST(MetricsTest, RowsAreCopies) {
  Kept kept;
  at::Tensor scores = at::tensor({1.0F, 2.0F});
  ASSERT_TRUE(kept.Update(scores).ok());
  scores.fill_(0);
  EXPECT_EQ(kept.Values().at("kept"), 3);
}

}  // namespace
}  // namespace ddp::metrics
