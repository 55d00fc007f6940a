#include "ddp/trainer/callbacks/early_stopping.h"

#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::trainer {
namespace {

constexpr char kMetric[] = "metric";
constexpr char kBest[] = "best";
constexpr char kSince[] = "since";

absl::StatusOr<checkpoint::BestMetric> Parse(const EarlyStoppingOptions& options) {
  absl::StatusOr<checkpoint::BestMetric> metric = checkpoint::ParseBestMetric(options.metric);
  if (metric.ok() && metric->count == 1) return metric;
  return OptionError(
      "metric", options.metric,
      "must be a metric and its better direction: test/accuracy:max or test/loss:min");
}

}  // namespace

absl::Status EarlyStopping::Validate(const EarlyStoppingOptions& options) {
  return options.metric.empty() ? absl::OkStatus() : Parse(options).status();
}

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options)
    : options_(options), metric_(Parse(options).value_or(checkpoint::BestMetric{})) {}

absl::Status EarlyStopping::OnSetUp(CallbackContext&) {
  best_ = std::numeric_limits<double>::quiet_NaN();
  since_ = 0;
  return absl::OkStatus();
}

absl::Status EarlyStopping::OnStart(CallbackContext& run) {
  StopIfDue(run);
  return absl::OkStatus();
}

void EarlyStopping::StopIfDue(CallbackContext& run) const {
  if (since_ < options_.patience) return;
  run.RequestStop(absl::StrFormat("%s has not improved in %d evaluations; its best value is %.6g",
                                  metric_.metric, since_, best_));
}

absl::Status EarlyStopping::OnEvaluationEnd(CallbackContext& run,
                                            const std::map<std::string, double>& metrics) {
  if (metrics.empty()) return absl::OkStatus();
  const auto found = metrics.find(metric_.metric);
  if (found == metrics.end()) {
    // Of the validation data alone, or of the test data.
    const std::string prefix = metric_.metric.substr(0, metric_.metric.find('/') + 1);
    const auto same_data = metrics.lower_bound(prefix);
    if (same_data == metrics.end() || !absl::StartsWith(same_data->first, prefix)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("the evaluation has no '", metric_.metric, "', but ",
                     absl::StrJoin(metrics, ", ", [](std::string* out, const auto& metric) {
                       absl::StrAppend(out, metric.first);
                     })));
  }
  const double gain = (found->second - best_) * (metric_.greatest ? 1 : -1);
  if (gain > options_.min_delta || (std::isnan(best_) && !std::isnan(found->second))) {
    best_ = found->second;
    since_ = 0;
  } else {
    ++since_;
  }
  StopIfDue(run);
  return absl::OkStatus();
}

absl::StatusOr<checkpoint::State> EarlyStopping::state_dict() {
  checkpoint::State state;
  state.root.insert(kMetric, options_.metric);
  if (!std::isnan(best_)) state.root.insert(kBest, best_);
  state.root.insert(kSince, since_);
  return state;
}

absl::Status EarlyStopping::CheckStateDict(const checkpoint::State& state) const {
  const checkpoint::Dict& root = state.root;
  if (root.contains(kMetric) && root.at(kMetric).isString() && root.contains(kSince) &&
      root.at(kSince).isInt() && (!root.contains(kBest) || root.at(kBest).isDouble())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("has no '", kMetric, "' or no '", kSince,
                                                 "', or a '", kBest, "' that is no number"));
}

absl::Status EarlyStopping::load_state_dict(const checkpoint::State& state,
                                            checkpoint::LoadNotes& notes) {
  // A run that rolls back knows more than the state does.
  best_ = std::numeric_limits<double>::quiet_NaN();
  since_ = 0;
  const std::string saved = state.root.at(kMetric).toStringRef();
  if (saved != options_.metric) {
    notes.Add(absl::StrCat("without what early_stopping knew of ", saved, ": it is now by ",
                           options_.metric));
    return absl::OkStatus();
  }
  if (state.root.contains(kBest)) best_ = state.root.at(kBest).toDouble();
  since_ = state.root.at(kSince).toInt();
  return absl::OkStatus();
}

}  // namespace ddp::trainer
