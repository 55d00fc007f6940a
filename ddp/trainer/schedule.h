// Learning-rate schedules as a factor over steps. A function of the step alone, so a resumed run
// needs no state but its step.
//
//   DDP_ASSIGN_OR_RETURN(Schedule schedule,
//                        Schedule::Create({.name = "cosine", .total_steps = n}));
//   double lr = base_lr * schedule.Factor(step);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::trainer {

struct ScheduleOptions {
  std::string name = "cosine";  // constant, step, cosine
  int64_t warmup_steps = 0;     // optimizer steps of linear warm-up; the first has 1/warmup_steps
  int64_t total_steps = 0;      // of the whole run, warm-up included (cosine's end)
  int64_t step_size = 0;        // step: steps between decays (torch.optim.lr_scheduler.StepLR)
  double gamma = 0.1;           // step: factor of each decay
};

// Immutable value.
class Schedule {
 public:
  // NotFound, listing what exists, for an unknown name; InvalidArgument for a bad number.
  static absl::StatusOr<Schedule> Create(const ScheduleOptions& options);

  static std::vector<std::string> Names() { return {"constant", "cosine", "step"}; }

  // Factor of the base learning rate for optimizer step `step`, counted from 0. After warm-up, with
  // t steps since and T = total_steps - warmup_steps: constant 1; step gamma^floor(t / step_size);
  // cosine (1 + cos(pi t / T)) / 2 (Loshchilov and Hutter, SGDR, 2017, one cycle down to 0).
  double Factor(int64_t step) const;

  const ScheduleOptions& options() const { return options_; }

 private:
  explicit Schedule(const ScheduleOptions& options) : options_(options) {}

  ScheduleOptions options_;
};

}  // namespace ddp::trainer
