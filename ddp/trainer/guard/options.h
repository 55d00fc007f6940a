// Options of the guard, which is off by default.
//
//   options.guard = {.on_anomaly = "skip", .anomaly_deviations = 8};
#pragma once

#include <cstdint>
#include <string>

#include "base/options.h"

namespace ddp::trainer {

// guard.h
struct GuardOptions {
  // What follows an anomaly. none: nobody looks for one. stop: the run ends with kAnomalyExitCode
  // (base/exit_code.h). skip: the step changes nothing. rollback: the run goes on from the newest
  // checkpoint before it, without the examples of the step.
  std::string on_anomaly = "none";
  // A loss or a norm of gradients that is by so many standard deviations above the mean of the last
  // `anomaly_window` steps is an anomaly, once half as many are known; 0: only one that is not
  // finite.
  double anomaly_deviations = 6;
  int64_t anomaly_window = 128;
};

constexpr auto OptionsOf(const GuardOptions&) {
  return Options(
      Option("on_anomaly", &GuardOptions::on_anomaly,
             "what follows a loss or gradient that is not finite or far above its mean: stop with "
             "an exit code of its own, skip the step, or rollback to a checkpoint; none: nothing")
          .OneOf("none", "stop", "skip", "rollback"),
      Option("anomaly_deviations", &GuardOptions::anomaly_deviations,
             "standard deviations above the mean of the last steps at which a loss or gradient "
             "norm is an anomaly; 0: only one that is not finite")
          .AtLeast(0)
          .AtMost(1e9),
      Option("anomaly_window", &GuardOptions::anomaly_window,
             "steps over which that mean and deviation are taken")
          .AtLeast(4)
          .AtMost(1e6));
}

}  // namespace ddp::trainer
