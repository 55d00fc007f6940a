#include "tools/step_report.h"

#include <algorithm>
#include <fstream>
#include <numeric>

#include "ATen/ops/tensor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace ddp::tools {
namespace {

constexpr size_t kWarmUpSteps = 10;
constexpr size_t kLastSteps = 20;

double Mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
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
  std::vector<double> per_rank = {losses_.empty() ? 0 : losses_[0],
                                  Mean({losses_.end() - static_cast<int64_t>(last), losses_.end()}),
                                  PssMib()};
  if (session.process_group()) {
    DDP_RETURN_IF_ERROR(CatchStatus("adding up the ranks' measurements", [&] {
      std::vector<at::Tensor> sum = {at::tensor(per_rank, at::kDouble).to(session.device())};
      session.process_group()->allreduce(sum)->wait();
      const at::Tensor total = sum[0].cpu();
      for (size_t i = 0; i < per_rank.size(); ++i) {
        per_rank[i] = total.data_ptr<double>()[i] / session.size();
      }
    }));
  }
  const nlohmann::json report = {{"ranks", session.size()},
                                 {"steps", losses_.size()},
                                 {"first_loss", per_rank[0]},
                                 {"last_loss", per_rank[1]},
                                 {"first_step_unix_s", first_step_unix_s_},
                                 {"step_ms_median", Median(steps_ms)},
                                 {"step_ms_mean", Mean(steps_ms)},
                                 {"pss_mib_per_rank", per_rank[2]}};
  return session.Agree(session.is_main()
                           ? WriteFileAtomically(path, absl::StrCat(report.dump(), "\n"))
                           : absl::OkStatus());
}

}  // namespace ddp::tools
