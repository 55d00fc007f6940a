#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/status.h"

namespace ddp::trainer {

absl::StatusOr<Schedule> Schedule::Create(const ScheduleOptions& options, int64_t epochs,
                                          int64_t steps_per_epoch) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  const double step_size = options.step_epochs * static_cast<double>(steps_per_epoch);
  return Schedule(options, std::max<int64_t>(1, epochs * steps_per_epoch),
                  std::max<int64_t>(1, static_cast<int64_t>(step_size)));
}

double Schedule::Factor(int64_t step) const {
  if (step < options_.warmup_steps) {
    return static_cast<double>(step + 1) / static_cast<double>(options_.warmup_steps);
  }
  const int64_t since = step - options_.warmup_steps;
  if (options_.name == "step") {
    return std::pow(options_.gamma, static_cast<double>(since / step_size_));
  }
  if (options_.name == "cosine") {
    const int64_t span = std::max<int64_t>(1, total_steps_ - options_.warmup_steps);
    const double progress = std::min(1.0, static_cast<double>(since) / static_cast<double>(span));
    return (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  }
  return 1.0;
}

}  // namespace ddp::trainer
