// Computes metrics over three ranks, for metrics_interop_test.py. Reads
//   {"classes": 4, "scores": [[…], …], "targets": [2, -100, …], "bounds": [0, 10, 10, 30]}
// and prints {"values": {…}, "confusion": [[…], …]}; rank r has the examples from bounds[r] to
// bounds[r + 1].

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/log/absl_check.h"
#include "backends/conformance/rank_threads.h"
#include "ddp/metrics/classification.h"
#include "ddp/metrics/mean.h"
#include "nlohmann/json.hpp"

int main() {
  const nlohmann::json input = nlohmann::json::parse(std::cin);
  const auto classes = input["classes"].get<int64_t>();
  const auto bounds = input["bounds"].get<std::vector<int64_t>>();
  std::vector<float> flat;
  for (const auto& row : input["scores"]) flat.insert(flat.end(), row.begin(), row.end());
  const at::Tensor scores = at::tensor(flat).view({-1, classes});
  const at::Tensor targets = at::tensor(input["targets"].get<std::vector<int64_t>>(), at::kLong);
  ddp::backends::RunRankThreads(3, "gloo", [&](const auto& place, const auto& group) {
    using namespace ddp::metrics;
    Accuracy accuracy, top2({.k = 2});
    ConfusionMatrix confusion(classes);
    F1 f1(classes);
    Auc auc;
    Perplexity perplexity;
    Mean mean;
    for (int64_t i = bounds[place.rank]; i < bounds[place.rank + 1]; i += 5) {
      const int64_t end = std::min(i + 5, bounds[place.rank + 1]);
      const at::Tensor output = scores.slice(0, i, end), target = targets.slice(0, i, end);
      for (Metric* metric : std::vector<Metric*>{&accuracy, &top2, &confusion, &f1, &perplexity}) {
        ABSL_CHECK_OK(metric->Update(output, target));
      }
      ABSL_CHECK_OK(auc.Update(output.select(1, 1), target.eq(1)));
      ABSL_CHECK_OK(mean.Update(output.select(1, 0), output.select(1, 1).abs()));
    }
    const auto values = ReduceMetrics(
        group.process_group, {&accuracy, &top2, &confusion, &f1, &auc, &perplexity, &mean});
    ABSL_CHECK_OK(values);
    if (place.rank != 0) return;
    std::vector<std::vector<int64_t>> rows(classes);
    const at::Tensor counts = confusion.Counts();
    for (int64_t i = 0; i < classes * classes; ++i) {
      rows[i / classes].push_back(counts[i / classes][i % classes].item<int64_t>());
    }
    std::cout << nlohmann::json{{"values", *values}, {"confusion", rows}} << std::endl;
  });
}
