#include "checkpoint/rng_state.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <mutex>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::checkpoint {

at::Tensor RngState(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

absl::Status LoadRngState(const c10::IValue& state, c10::Device device) {
  const at::Tensor now = RngState(device);
  if (!state.isTensor() || !state.toTensor().defined() ||
      state.toTensor().scalar_type() != at::kByte || state.toTensor().sizes() != now.sizes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "random generator state: need a uint8 tensor of ", now.numel(), " elements, got ",
        state.isTensor() && state.toTensor().defined()
            ? absl::StrCat(c10::toString(state.toTensor().scalar_type()), " of ",
                           state.toTensor().numel(), " elements")
            : state.tagKind()));
  }
  const at::Tensor bytes = state.toTensor().cpu().contiguous();
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const absl::Status set =
      CatchStatus("random generator state", [&] { generator.set_state(bytes); });
  if (set.ok()) return set;
  return absl::InvalidArgumentError(set.message());
}

}  // namespace ddp::checkpoint
