#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::trainer {

absl::StatusOr<Schedule> Schedule::Create(const ScheduleOptions& options) {
  const std::vector<std::string> names = Names();
  if (std::find(names.begin(), names.end(), options.name) == names.end()) {
    return absl::NotFoundError(absl::StrCat("unknown schedule '", options.name,
                                            "'; there are: ", absl::StrJoin(names, ", ")));
  }
  if (options.warmup_steps < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("warmup_steps=", options.warmup_steps, " must not be negative"));
  }
  if (options.name == "step" && options.step_size <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("step_size=", options.step_size, " of schedule 'step' must be positive"));
  }
  if (options.name == "cosine" && options.total_steps <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("total_steps=", options.total_steps,
                                                   " of schedule 'cosine' must be positive"));
  }
  return Schedule(options);
}

double Schedule::Factor(int64_t step) const {
  if (step < options_.warmup_steps) {
    return static_cast<double>(step + 1) / static_cast<double>(options_.warmup_steps);
  }
  const int64_t since = step - options_.warmup_steps;
  if (options_.name == "step") {
    return std::pow(options_.gamma, static_cast<double>(since / options_.step_size));
  }
  if (options_.name == "cosine") {
    const int64_t span = std::max<int64_t>(1, options_.total_steps - options_.warmup_steps);
    const double progress = std::min(1.0, static_cast<double>(since) / static_cast<double>(span));
    return (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  }
  return 1.0;
}

}  // namespace ddp::trainer
