// Automatic mixed precision for a scope, as torch.autocast.
//
//   at::Tensor output;
//   {
//     const Autocast autocast(device.type(), at::kBFloat16);
//     output = model->forward(input);  // matrix products and convolutions in bfloat16
//   }
//   loss(output.to(at::kFloat), target).backward();  // parameters and gradients stay float32
#pragma once

#include "ATen/autocast_mode.h"
#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"

namespace ddp {

// While it exists, operators that this thread calls choose the dtype of their inputs: those that
// torch lists as safe run in `dtype`, those that need the range run in float32. Guards nest; the
// end of the outermost one drops the cache of converted parameters. Do not use it around backward,
// whose operators run in the dtypes that forward chose. float16 gradients underflow: see
// GradScaler.
class [[nodiscard]] Autocast {
 public:
  // `dtype`: kBFloat16 or kHalf; kFloat: no autocast in this scope. Throws c10::Error for others.
  Autocast(c10::DeviceType device, c10::ScalarType dtype)
      : device_(device),
        enabled_before_(at::autocast::is_autocast_enabled(device)),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    TORCH_CHECK(dtype == c10::kBFloat16 || dtype == c10::kHalf || dtype == c10::kFloat,
                "Autocast: dtype ", dtype, " is none of BFloat16, Half and Float");
    const bool enabled = dtype != c10::kFloat;
    at::autocast::set_autocast_enabled(device_, enabled);
    if (enabled) at::autocast::set_autocast_dtype(device_, dtype);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_enabled(device_, enabled_before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const c10::DeviceType device_;
  const bool enabled_before_;
  const c10::ScalarType dtype_before_;
};

}  // namespace ddp
