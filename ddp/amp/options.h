// Options of the gradient scaler, with the names and defaults of torch.amp.GradScaler.
#pragma once

#include <cstdint>

#include "base/options.h"

namespace ddp {

struct GradScalerOptions {
  double init_scale = 65536;    // a normal float32, so that its inverse is finite
  double growth_factor = 2;     // after growth_interval steps in a row without infinities
  double backoff_factor = 0.5;  // after a step with an infinity or NaN, which is skipped
  int64_t growth_interval = 2000;
};

constexpr auto OptionsOf(const GradScalerOptions&) {
  return Options(Option("init_scale", &GradScalerOptions::init_scale, "initial scale of the loss")
                     .AtLeast(1.2e-38)
                     .AtMost(3.4e38),
                 Option("growth_factor", &GradScalerOptions::growth_factor,
                        "factor by which the scale grows after growth_interval finite steps")
                     .Above(1),
                 Option("backoff_factor", &GradScalerOptions::backoff_factor,
                        "factor by which infinite gradients reduce the scale, below 1")
                     .Above(0)
                     .AtMost(0.999999),
                 Option("growth_interval", &GradScalerOptions::growth_interval,
                        "finite steps in a row before the scale grows")
                     .AtLeast(1));
}

}  // namespace ddp
