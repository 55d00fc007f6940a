// The mean of any values, such as errors by example.
//
//   metrics::Mean error("absolute_error");
//   DDP_RETURN_IF_ERROR(error.Update((output - target).abs()));
#pragma once

#include <map>
#include <string>

#include "ddp/metrics/metric.h"

namespace ddp::metrics {

// Σ weight · value / Σ weight, in double; NaN if the weights' sum is 0, as of no values at all, and
// if a value is NaN.
class Mean final : public Metric {
 public:
  // Update(values, weights): a tensor of any shape, and weights of the same shape; without them
  // each value counts once. InvalidArgument for another shape.
  explicit Mean(std::string name = "mean");

  // Adds a sum of values and their number, as a loss has them. FailedPrecondition as Update.
  absl::Status Add(double sum, double count);

  std::map<std::string, double> Values() const override;

 private:
  absl::Status Accumulate(const at::Tensor& values, const at::Tensor& weights) override;

  at::Tensor& sums_;  // double [2]: Σ weight · value, Σ weight
};

}  // namespace ddp::metrics
