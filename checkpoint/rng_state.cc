#include "checkpoint/rng_state.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::checkpoint {

at::Tensor RngState(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

namespace {

absl::Status SetState(at::Generator generator, const c10::IValue& state) {
  const absl::Status set = CatchStatus(
      "random generator state", [&] { generator.set_state(state.toTensor().cpu().contiguous()); });
  if (set.ok()) return set;
  return absl::InvalidArgumentError(set.message());
}

}  // namespace

absl::Status CheckRngState(const c10::IValue& state, c10::Device device) {
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
  // Not each tensor of this size is a state: a copy of the generator tries it.
  at::Generator generator = at::globalContext().defaultGenerator(device);
  at::Generator copy;
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    copy = generator.clone();
  }
  return SetState(std::move(copy), state);
}

absl::Status LoadRngState(const c10::IValue& state, c10::Device device) {
  DDP_RETURN_IF_ERROR(CheckRngState(state, device));
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return SetState(generator, state);
}

}  // namespace ddp::checkpoint
