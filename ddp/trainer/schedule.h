// Learning-rate schedules: a factor as a function of the step. What a checkpoint keeps of them does
// not depend on the world size.
//
//   DDP_ASSIGN_OR_RETURN(Schedule schedule, Schedule::Create({.name = "cosine"}, {.epochs = 4,
//   .steps_per_epoch = 100})); double lr = base_lr * schedule.Factor(step);
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"

namespace ddp::trainer {

struct ScheduleOptions {
  std::string name = "constant";  // constant, step, cosine
  // Steps of linear warm-up; factor of the first: 1/warmup_steps. A run that is resumed in another
  // world counts them as steps of the world that it began in.
  int64_t warmup_steps = 0;
  double step_epochs = 1;  // step: epochs between decays
  double gamma = 0.1;      // step: factor of each decay
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

// How long a run is, in optimizer steps. The run ends with what comes first of its epochs and
// max_steps.
struct RunLength {
  int64_t epochs = 1;
  int64_t steps_per_epoch = 1;
  int64_t max_steps = 0;  // 0: no limit

  int64_t total_steps() const {
    const int64_t all = epochs * steps_per_epoch;
    return max_steps > 0 ? std::min(all, max_steps) : all;
  }
};

// The time of a schedule at each step, in optimizer steps of the world that the run began in.
struct Pace {
  // Of the run since it was resumed in its present world.
  int64_t first_step = 0;
  double first_time = 0;
  double time_per_step = 1;

  double Time(int64_t step) const {
    return first_time + static_cast<double>(step - first_step) * time_per_step;
  }
};

// How far a run has come.
struct SavedProgress {
  double progress = 0;  // the part of the schedule that is done, in [0, 1]; the same in any world
  // Of the schedule, in steps of the world that the run began in.
  int64_t total_steps = 1;
  int64_t steps_per_epoch = 1;
  Pace pace = {};
};

// An immutable value; thread-safe.
//
// In the world that the run began in a step takes a time of exactly 1. If a run is resumed in
// another world, the time that is left is spread over the steps that are left, so that the schedule
// ends where the run ends.
class Schedule {
 public:
  // For a run from its beginning; total_steps() is at least 1. OptionError for options out of
  // range.
  static absl::StatusOr<Schedule> Create(const ScheduleOptions& options, const RunLength& length);

  // This schedule for a run that was saved with `saved` after `step` steps of all worlds, and takes
  // `remaining` steps in this one. A cosine ends with them. The others do not depend on the run's
  // length: if that has changed, their decays stay as many epochs apart as they were. Times are
  // exactly those of the run that was saved, if its pace ends with this run, too.
  Schedule Resumed(const SavedProgress& saved, int64_t step, int64_t remaining) const;

  // Factor of the base learning rate for optimizer step `step`, counted from 0, of a time t after
  // warm-up and T = total_steps() - warmup_steps: constant 1; step gamma^floor(t / step_size());
  // cosine (1 + cos(pi t / T)) / 2 (Loshchilov and Hutter, SGDR, 2017, one cycle down to 0).
  double Factor(int64_t step) const;

  // The part of the schedule that is done after `step` steps, in [0, 1].
  double Progress(int64_t step) const;

  const ScheduleOptions& options() const { return options_; }
  const RunLength& length() const { return length_; }
  int64_t total_steps() const { return total_steps_; }  // warm-up included
  int64_t steps_per_epoch() const { return length_.steps_per_epoch; }
  // Steps between decays (torch.optim.lr_scheduler.StepLR).
  int64_t step_size() const { return step_size_; }
  const Pace& pace() const { return pace_; }

 private:
  Schedule(const ScheduleOptions& options, const RunLength& length);

  ScheduleOptions options_;
  RunLength length_;  // with steps_per_epoch of the world that the run began in
  int64_t total_steps_;
  int64_t step_size_;
  Pace pace_;
};

}  // namespace ddp::trainer
