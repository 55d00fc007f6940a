// Lower learning rates once a metric no longer improves, as
// torch.optim.lr_scheduler.ReduceLROnPlateau.
//
//   Plateau plateau({.patience = 2});
//   plateau.Add(validation_loss);            // after each evaluation
//   double lr = plateau.Rate(base_lr);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/options.h"

namespace ddp::trainer {

struct PlateauOptions {
  std::string metric = "test/loss";  // by its name in the logs
  std::string mode = "min";          // min, max: which values of it are better
  double factor = 0.1;               // of the rates, each time that they are reduced
  int64_t patience = 10;             // evaluations without improvement that are tolerated
  // An evaluation improves on the best one if it is better by more than this: rel, a part of the
  // best value; abs, a difference.
  double threshold = 1e-4;
  std::string threshold_mode = "rel";
  int64_t cooldown = 0;  // evaluations after a reduction that do not count
  double min_lr = 0;     // of each parameter group
};

// Aliases, since names like "mode" say little by themselves.
constexpr auto OptionsOf(const PlateauOptions&) {
  constexpr double kMost = 1e9;
  return Options(
      Option("metric", &PlateauOptions::metric, "metric of the evaluation that is to improve")
          .Alias("plateau_metric"),
      Option("mode", &PlateauOptions::mode, "whether small or large values of it are better")
          .Alias("plateau_mode")
          .OneOf("min", "max"),
      Option("factor", &PlateauOptions::factor, "factor of each reduction of the learning rate")
          .Alias("plateau_factor")
          .Above(0)
          .AtMost(1),
      Option("patience", &PlateauOptions::patience,
             "evaluations without improvement before a reduction")
          .Alias("plateau_patience")
          .AtLeast(0)
          .AtMost(kMost),
      Option("threshold", &PlateauOptions::threshold, "least improvement that counts")
          .Alias("plateau_threshold")
          .AtLeast(0)
          .AtMost(kMost),
      Option("threshold_mode", &PlateauOptions::threshold_mode,
             "rel: threshold is a part of the best value; abs: a difference")
          .Alias("plateau_threshold_mode")
          .OneOf("rel", "abs"),
      Option("cooldown", &PlateauOptions::cooldown,
             "evaluations after a reduction that do not count")
          .Alias("plateau_cooldown")
          .AtLeast(0)
          .AtMost(kMost),
      Option("min_lr", &PlateauOptions::min_lr, "rates are not reduced below this")
          .Alias("plateau_min_lr")
          .AtLeast(0)
          .AtMost(kMost));
}

// Thread-compatible. A value.
class Plateau {
 public:
  // `options` are in range.
  explicit Plateau(PlateauOptions options) : options_(std::move(options)) {}

  // The metric of one more evaluation. NaN is no improvement. Returns whether rates are reduced.
  bool Add(double value);

  // The learning rate of a group whose base rate is `base`.
  double Rate(double base) const;

  // The state that it has learned.
  struct State {
    std::optional<double> best = std::nullopt;  // nullopt: none yet
    int64_t bad = 0;                            // evaluations since then
    int64_t cooldown = 0;                       // evaluations that do not count any more
    double scale = 1;                           // product of all reductions
  };
  const State& state() const { return state_; }
  void set_state(const State& state) { state_ = state; }
  const PlateauOptions& options() const { return options_; }

 private:
  bool Improves(double value) const;

  PlateauOptions options_;
  State state_;
};

}  // namespace ddp::trainer
