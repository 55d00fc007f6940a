#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/status.h"

namespace ddp::trainer {
namespace {

// Times that differ by less are equal.
constexpr double kRounding = 1e-6;

}  // namespace

Schedule::Schedule(const ScheduleOptions& options, const RunLength& length)
    : options_(options),
      length_(length),
      total_steps_(std::max<int64_t>(1, length.total_steps())),
      step_size_(std::max<int64_t>(
          1, static_cast<int64_t>(options.step_epochs *
                                  static_cast<double>(length.steps_per_epoch)))) {}

absl::StatusOr<Schedule> Schedule::Create(const ScheduleOptions& options, const RunLength& length) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  return Schedule(options, length);
}

Schedule Schedule::Resumed(const SavedProgress& saved, int64_t step, int64_t remaining) const {
  RunLength length = length_;
  length.steps_per_epoch = saved.steps_per_epoch;
  Schedule resumed(options_, length);
  if (options_.name == "cosine") resumed.total_steps_ = saved.total_steps;
  const auto total = static_cast<double>(resumed.total_steps_);
  const double time = saved.progress * static_cast<double>(saved.total_steps);
  const bool same_pace = std::abs(saved.pace.Time(step) - time) < kRounding &&
                         std::abs(saved.pace.Time(step + remaining) - total) < kRounding;
  resumed.pace_ = same_pace
                      ? saved.pace
                      : Pace{.first_step = step,
                             .first_time = time,
                             .time_per_step = remaining > 0 ? std::max(0.0, total - time) /
                                                                  static_cast<double>(remaining)
                                                            : 0.0};
  return resumed;
}

double Schedule::Progress(int64_t step) const {
  return std::clamp(pace_.Time(step) / static_cast<double>(total_steps_), 0.0, 1.0);
}

double Schedule::Factor(int64_t step) const {
  const double time = pace_.Time(step);
  const auto warmup = static_cast<double>(options_.warmup_steps);
  if (time < warmup - kRounding) return std::min(1.0, (time + pace_.time_per_step) / warmup);
  const double since = std::max(0.0, time - warmup);
  if (options_.name == "step") {
    const auto whole = static_cast<int64_t>(since + kRounding);
    return std::pow(options_.gamma, static_cast<double>(whole / step_size_));
  }
  if (options_.name == "cosine") {
    const int64_t span = std::max<int64_t>(1, total_steps_ - options_.warmup_steps);
    const double progress = std::min(1.0, since / static_cast<double>(span));
    return (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  }
  return 1.0;
}

}  // namespace ddp::trainer
