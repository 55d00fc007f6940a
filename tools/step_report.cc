#include "tools/step_report.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/gather/gather.h"
#include "nlohmann/json.hpp"

namespace ddp::tools {
namespace {

constexpr size_t kWarmUpSteps = 10;
constexpr size_t kLastSteps = 20;
// Becomes null in JSON.
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

// Proportional set size of this process: shared pages count by their share.
double PssMib() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    double kib = 0;
    if (words.size() >= 2 && words[0] == "Pss:" && absl::SimpleAtod(words[1], &kib)) {
      return kib / 1024;
    }
  }
  return 0;
}

}  // namespace

void StepReport::Add(const at::Tensor& loss) {
  losses_.push_back(loss.item<double>());
  ends_s_.push_back(absl::ToDoubleSeconds(absl::Nanoseconds(absl::GetCurrentTimeNanos())));
  if (ends_s_.size() == 1) first_step_unix_s_ = ends_s_[0];
}

absl::Status StepReport::Write(const session::Session& session, const std::string& path) const {
  std::vector<double> steps_ms;
  for (size_t i = kWarmUpSteps; i + 1 < ends_s_.size(); ++i) {
    steps_ms.push_back(1e3 * (ends_s_[i + 1] - ends_s_[i]));
  }
  const size_t last = std::min(kLastSteps, losses_.size());
  std::map<std::string, double> means = {
      {"first_loss", losses_.empty() ? kNone : losses_[0]},
      {"last_loss", Mean({losses_.end() - static_cast<int64_t>(last), losses_.end()})},
      {"pss_mib_per_rank", PssMib()}};
  DDP_ASSIGN_OR_RETURN(means, ReduceDict(session.process_group(), means, DictReduction::kMean));
  const nlohmann::json report = {{"ranks", session.size()},
                                 {"steps", losses_.size()},
                                 {"first_loss", means["first_loss"]},
                                 {"last_loss", means["last_loss"]},
                                 {"first_step_unix_s", first_step_unix_s_},
                                 {"step_ms_median", Median(steps_ms)},
                                 {"step_ms_mean", Mean(steps_ms)},
                                 {"pss_mib_per_rank", means["pss_mib_per_rank"]}};
  return session.Agree(session.is_main()
                           ? WriteFileAtomically(path, absl::StrCat(report.dump(), "\n"))
                           : absl::OkStatus());
}

}  // namespace ddp::tools
