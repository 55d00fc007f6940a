#include "ddp/trainer/callbacks/monitors.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "ddp/gather/gather.h"

namespace ddp::trainer {

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

absl::Status LearningRateMonitor::OnStepEnd(CallbackContext& run, const at::Tensor&) {
  if (!run.is_recorded()) return absl::OkStatus();
  for (const CallbackPhase& phase : run.phases()) {
    const auto& groups = phase.optimizer.optimizer().param_groups();
    for (size_t i = 0; i < groups.size(); ++i) {
      run.Record(absl::StrCat("lr/group_", i, phase.suffix), groups[i].options().get_lr());
    }
  }
  return absl::OkStatus();
}

void ThroughputMonitor::BeginInterval(const CallbackContext& run) {
  begin_ = absl::Now();
  sample_ = run.position().sample;
  data_wait_s_ = run.data_wait_s();
  pause_s_ = run.pause_s();
}

absl::Status ThroughputMonitor::OnEpochBegin(CallbackContext& run) {
  BeginInterval(run);
  return absl::OkStatus();
}

absl::Status ThroughputMonitor::OnStepEnd(CallbackContext& run, const at::Tensor&) {
  if (!run.is_recorded()) return absl::OkStatus();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin_) - (run.pause_s() - pause_s_);
  const double wait = (run.data_wait_s() - data_wait_s_) / seconds;
  DDP_ASSIGN_OR_RETURN(const std::vector<double> waits,
                       AllGather(run.session().process_group(), wait));
  run.Record("train/examples_per_second",
             static_cast<double>(run.position().sample - sample_) / seconds);
  run.Record("train/data_wait", *std::max_element(waits.begin(), waits.end()));
  BeginInterval(run);
  return absl::OkStatus();
}

absl::Status MemoryMonitor::OnStepEnd(CallbackContext& run, const at::Tensor&) {
  if (!run.is_recorded()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const std::vector<double> all,
                       AllGather(run.session().process_group(), PssMib()));
  if (std::find(all.begin(), all.end(), 0.0) != all.end()) return absl::OkStatus();
  const double sum = std::accumulate(all.begin(), all.end(), 0.0);
  run.Record("train/pss_mib", sum / static_cast<double>(all.size()));
  run.Record("train/pss_mib_max", *std::max_element(all.begin(), all.end()));
  return absl::OkStatus();
}

}  // namespace ddp::trainer
