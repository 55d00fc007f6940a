#include "ddp/trainer/plateau.h"

#include <algorithm>
#include <cmath>

namespace ddp::trainer {

bool Plateau::Improves(double value) const {
  if (std::isnan(value)) return false;
  if (!state_.best) return true;
  const bool is_relative = options_.threshold_mode == "rel";
  const double sign = options_.mode == "min" ? -1 : 1;
  const double least = is_relative ? *state_.best * (1 + sign * options_.threshold)
                                   : *state_.best + sign * options_.threshold;
  return options_.mode == "min" ? value < least : value > least;
}

bool Plateau::Add(double value) {
  if (Improves(value)) {
    state_.best = value;
    state_.bad = 0;
  } else {
    ++state_.bad;
  }
  if (state_.cooldown > 0) {
    --state_.cooldown;
    state_.bad = 0;
  }
  if (state_.bad <= options_.patience) return false;
  state_.scale *= options_.factor;
  state_.cooldown = options_.cooldown;
  state_.bad = 0;
  return true;
}

// A base rate below min_lr stays what it is.
double Plateau::Rate(double base) const {
  return std::min(base, std::max(base * state_.scale, options_.min_lr));
}

}  // namespace ddp::trainer
