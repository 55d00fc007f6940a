#include "tools/step_report.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/gather/gather.h"
#include "ddp/trainer/callbacks/monitors.h"
#include "nlohmann/json.hpp"

namespace ddp::tools {
namespace {

constexpr size_t kWarmUpSteps = 10;
constexpr size_t kLastSteps = 20;
// It becomes null in JSON.
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double Mean(const std::vector<double>& values) {
  if (values.empty()) return kNone;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Median(std::vector<double> values) {
  if (values.empty()) return kNone;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

absl::Status StepReport::CheckPath(const session::Session& session) const {
  if (path_.empty() || !session.is_main()) return absl::OkStatus();
  std::error_code ignored;
  absl::Status writable =
      absl::EndsWith(path_, "/") || std::filesystem::is_directory(path_, ignored)
          ? absl::InvalidArgumentError("it is a folder")
          : MakeDirectories(DirectoryOf(path_));
  if (writable.ok()) writable = ProveWritable(DirectoryOf(path_));
  if (writable.ok()) return writable;
  return OptionError("bench_json", path_, absl::StrCat("cannot be written: ", writable.message()),
                     writable.code());
}

std::function<trainer::StepAction(int64_t, const at::Tensor&)> StepReport::OnStep() {
  if (path_.empty()) return nullptr;
  return [this](int64_t, const at::Tensor& loss) {
    losses_.push_back(loss.item<double>());
    ends_s_.push_back(absl::ToDoubleSeconds(absl::Nanoseconds(absl::GetCurrentTimeNanos())));
    if (ends_s_.size() == 1) first_step_unix_s_ = ends_s_[0];
    if (ends_s_.size() == kWarmUpSteps) pss_mib_ = trainer::PssMib();
    return trainer::StepAction::kContinue;
  };
}

absl::Status StepReport::Write(const session::Session& session,
                               const std::map<std::string, double>& further) const {
  if (path_.empty()) return absl::OkStatus();
  std::vector<double> steps_ms;
  for (size_t i = kWarmUpSteps; i + 1 < ends_s_.size(); ++i) {
    steps_ms.push_back(1e3 * (ends_s_[i + 1] - ends_s_[i]));
  }
  const size_t last = std::min(kLastSteps, losses_.size());
  std::map<std::string, double> means = {
      {"first_loss", losses_.empty() ? kNone : losses_[0]},
      {"last_loss", Mean({losses_.end() - static_cast<int64_t>(last), losses_.end()})},
      {"pss_mib_per_rank", pss_mib_.value_or(trainer::PssMib())}};
  DDP_ASSIGN_OR_RETURN(means, ReduceDict(session.process_group(), means, DictReduction::kMean));
  nlohmann::json report = {{"ranks", session.size()},
                           {"steps", losses_.size()},
                           {"first_loss", means["first_loss"]},
                           {"last_loss", means["last_loss"]},
                           {"first_step_unix_s", first_step_unix_s_},
                           {"step_ms_median", Median(steps_ms)},
                           {"step_ms_mean", Mean(steps_ms)},
                           {"pss_mib_per_rank", means["pss_mib_per_rank"]}};
  for (const auto& [name, value] : further) report[name] = value;
  return session.Agree(session.is_main()
                           ? WriteFileAtomically(path_, absl::StrCat(report.dump(), "\n"))
                           : absl::OkStatus());
}

}  // namespace ddp::tools
