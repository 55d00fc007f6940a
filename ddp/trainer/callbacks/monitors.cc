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
#include "c10/core/CachingDeviceAllocator.h"
#include "ddp/gather/gather.h"

namespace ddp::trainer {
namespace {

// Of a rank, in MiB.
struct Memory {
  double pss = 0;
  double device = 0;
  double device_peak = 0;
};
constexpr auto FieldsOf(const Memory&) {
  return Fields(Field("pss", &Memory::pss), Field("device", &Memory::device),
                Field("device_peak", &Memory::device_peak));
}

double MiB(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

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

DeviceMemory DeviceMemoryOf(c10::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return {};
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  const auto stats = allocator->getDeviceStats(index);
  const auto& bytes =
      stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {.now = MiB(bytes.current), .peak = MiB(bytes.peak)};
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
  const DeviceMemory device = DeviceMemoryOf(run.session().device());
  const Memory mine = {.pss = PssMib(), .device = device.now, .device_peak = device.peak};
  DDP_ASSIGN_OR_RETURN(const std::vector<Memory> all,
                       AllGather(run.session().process_group(), mine));
  const auto values = [&](double Memory::*member) {
    std::vector<double> of_ranks;
    for (const Memory& each : all) of_ranks.push_back(each.*member);
    return of_ranks;
  };
  // Nothing where a rank does not know its value.
  const auto record = [&](const std::string& tag, const std::vector<double>& of_ranks) {
    if (std::find(of_ranks.begin(), of_ranks.end(), 0.0) != of_ranks.end()) return;
    const double sum = std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
    run.Record(tag, sum / static_cast<double>(of_ranks.size()));
    run.Record(absl::StrCat(tag, "_max"), *std::max_element(of_ranks.begin(), of_ranks.end()));
  };
  record("train/pss_mib", values(&Memory::pss));
  record("train/device_mib", values(&Memory::device));
  const std::vector<double> peaks = values(&Memory::device_peak);
  const double peak = *std::max_element(peaks.begin(), peaks.end());
  if (peak > 0) run.Record("train/device_peak_mib", peak);
  return absl::OkStatus();
}

}  // namespace ddp::trainer
