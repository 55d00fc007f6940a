// Options of the built-in callbacks. Each is off by default.
//
//   options.ema = {.decay = 0.999, .eval = true};
//   options.early_stopping = {.metric = "test/accuracy:max", .patience = 3};
#pragma once

#include <cstdint>
#include <string>

#include "base/options.h"

namespace ddp::trainer {

// callbacks/ema.h
struct EmaOptions {
  double decay = 0;  // of the average, per step; 0: none is made
  // The decay of the n-th update (from 0) is at most (1 + n) / (10 + n), so that an early average
  // is not that of the first weights. Source: TensorFlow's ExponentialMovingAverage, num_updates.
  bool warmup = false;
  bool eval = false;  // evaluate the average, also with eval_only
};

constexpr auto OptionsOf(const EmaOptions&) {
  return Options(Option("decay", &EmaOptions::decay,
                        "decay per step of an average of the weights, such as 0.999; 0: no average")
                     .AtLeast(0)
                     .AtMost(1),
                 Option("warmup", &EmaOptions::warmup,
                        "limit the decay to (1 + n) / (10 + n) after n steps of the average"),
                 Option("eval", &EmaOptions::eval, "evaluate the average instead of the weights")
                     .Alias("eval_ema"));
}

// callbacks/early_stopping.h
struct EarlyStoppingOptions {
  std::string metric = "";  // "test/accuracy:max", "test/loss:min"; empty: do not stop early
  int64_t patience = 3;
  double min_delta = 0;
};

constexpr auto OptionsOf(const EarlyStoppingOptions&) {
  return Options(
      Option("metric", &EarlyStoppingOptions::metric,
             "stop when this value of the evaluation no longer improves: test/accuracy:max, "
             "test/loss:min; empty: train to the end")
          .Alias("early_stopping"),
      Option("patience", &EarlyStoppingOptions::patience,
             "evaluations in a row without an improvement after which to stop")
          .AtLeast(1)
          .AtMost(1e9),
      Option("min_delta", &EarlyStoppingOptions::min_delta,
             "the least change that is an improvement")
          .AtLeast(0)
          .AtMost(1e9));
}

// callbacks/monitors.h
struct MonitorOptions {
  bool learning_rates = false;
  bool gradient_norm = false;
  bool throughput = false;
  bool memory = false;
};

constexpr auto OptionsOf(const MonitorOptions&) {
  return Options(
      Option("learning_rates", &MonitorOptions::learning_rates,
             "record the learning rate of each parameter group")
          .Incidental(),
      Option("gradient_norm", &MonitorOptions::gradient_norm,
             "record the norm of all gradients, also without clip_norm")
          .Incidental(),
      Option("throughput", &MonitorOptions::throughput,
             "record examples per second, and the share of the time that is spent waiting for data")
          .Incidental(),
      Option("memory", &MonitorOptions::memory,
             "record the memory of the ranks' processes (proportional set size)")
          .Incidental());
}

}  // namespace ddp::trainer
