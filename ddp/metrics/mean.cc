#include "ddp/metrics/mean.h"

#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::metrics {

Mean::Mean(std::string name)
    : Metric(std::move(name)), sums_(AddSums(at::zeros({2}, at::kDouble))) {}

absl::Status Mean::Add(double sum, double count) {
  DDP_RETURN_IF_ERROR(CheckNotReduced());
  double* sums = sums_.mutable_data_ptr<double>();
  sums[0] += sum;
  sums[1] += count;
  return absl::OkStatus();
}

std::map<std::string, double> Mean::Values() const {
  const double* sums = sums_.const_data_ptr<double>();
  return {{name(), sums[0] / sums[1]}};
}

absl::Status Mean::Accumulate(const at::Tensor& values, const at::Tensor& weights) {
  const at::Tensor all = values.to(at::kDouble);
  if (!weights.defined()) return Add(all.sum().item<double>(), static_cast<double>(all.numel()));
  if (weights.sizes() != values.sizes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights must have the shape of the values, but are ", ShapeOf(weights),
                     ", and the values ", ShapeOf(values)));
  }
  const at::Tensor weight = weights.to(at::kDouble);
  return Add(all.mul(weight).sum().item<double>(), weight.sum().item<double>());
}

}  // namespace ddp::metrics
