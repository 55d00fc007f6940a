// Automatic mixed precision for a scope, as torch.autocast.
//
//   at::Tensor output;
//   {
//     const Autocast autocast(device.type(), at::kBFloat16);
//     output = model->forward(input);  // matrix products and convolutions in bfloat16
//   }
//   loss(output.to(at::kFloat), target).backward();  // parameters and gradients stay float32
#pragma once

#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"

namespace ddp {

// While it exists, operators that this thread calls choose the dtype of their inputs: those that
// torch lists as safe run in `dtype`, those that need the range run in float32. Guards nest; the
// end of the outermost one drops the cache of converted parameters. Do not use it around backward,
// whose operators run in the dtypes that forward chose. float16 gradients underflow: see
// GradScaler.
class [[nodiscard]] Autocast {
 public:
  // `dtype`: kBFloat16 or kHalf; kFloat: no autocast in this scope. Throws c10::Error for others.
  Autocast(c10::DeviceType device, c10::ScalarType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const c10::DeviceType device_;
  const bool enabled_before_;
  const c10::ScalarType dtype_before_;
};

}  // namespace ddp
