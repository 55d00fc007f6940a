#include "ddp/amp/autocast.h"

#include "ATen/autocast_mode.h"
#include "c10/util/Exception.h"

namespace ddp {

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype)
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

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_enabled(device_, enabled_before_);
}

}  // namespace ddp
