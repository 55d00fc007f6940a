// Learning-rate schedules: a factor as a function of the step alone, so a resumed run needs no
// other state.
//
//   DDP_ASSIGN_OR_RETURN(Schedule schedule, Schedule::Create({.name = "cosine"}, epochs, steps));
//   double lr = base_lr * schedule.Factor(step);
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"

namespace ddp::trainer {

struct ScheduleOptions {
  std::string name = "constant";  // constant, step, cosine
  int64_t warmup_steps = 0;       // steps of linear warm-up; factor of the first: 1/warmup_steps
  double step_epochs = 1;         // step: epochs between decays
  double gamma = 0.1;             // step: factor of each decay
};

constexpr auto OptionsOf(const ScheduleOptions&) {
  constexpr double kMost = 1e9;
  return Options(
      Option("name", &ScheduleOptions::name, "schedule of the learning rate")
          .OneOf("constant", "step", "cosine"),
      Option("warmup_steps", &ScheduleOptions::warmup_steps, "optimizer steps of linear warm-up")
          .AtLeast(0)
          .AtMost(kMost),
      Option("step_epochs", &ScheduleOptions::step_epochs,
             "with schedule step: epochs between decays of the learning rate")
          .AtLeast(1e-6)
          .AtMost(kMost),
      Option("gamma", &ScheduleOptions::gamma, "with schedule step: factor of each decay")
          .AtLeast(0)
          .AtMost(kMost));
}

// An immutable value; thread-safe.
class Schedule {
 public:
  // For `epochs` epochs of `steps_per_epoch` optimizer steps each; total_steps() is at least 1.
  // OptionError for options out of range.
  static absl::StatusOr<Schedule> Create(const ScheduleOptions& options, int64_t epochs,
                                         int64_t steps_per_epoch);

  // Factor of the base learning rate for optimizer step `step`, counted from 0. After warm-up, with
  // t steps since and T = total_steps() - warmup_steps: constant 1; step gamma^floor(t /
  // step_size()); cosine (1 + cos(pi t / T)) / 2 (Loshchilov and Hutter, SGDR, 2017, one cycle down
  // to 0).
  double Factor(int64_t step) const;

  const ScheduleOptions& options() const { return options_; }
  int64_t total_steps() const { return total_steps_; }  // of the whole run, warm-up included
  // Steps between decays (torch.optim.lr_scheduler.StepLR).
  int64_t step_size() const { return step_size_; }

 private:
  Schedule(const ScheduleOptions& options, int64_t total_steps, int64_t step_size)
      : options_(options), total_steps_(total_steps), step_size_(step_size) {}

  ScheduleOptions options_;
  int64_t total_steps_;
  int64_t step_size_;
};

}  // namespace ddp::trainer
