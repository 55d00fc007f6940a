// The state of torch's default CPU random generator, as Python's torch.get_rng_state() gives it.
//
//   state.root.insert("rng", RngState());
//   DDP_RETURN_IF_ERROR(LoadRngState(state.root.at("rng")));
#pragma once

#include <ATen/core/ivalue.h>

#include "absl/status/status.h"

namespace ddp::checkpoint {

// A new uint8 tensor [5056]. Thread-safe.
at::Tensor RngState();

// Restores it. InvalidArgument if `state` is not such a tensor; the generator is then unchanged.
// Thread-safe.
absl::Status LoadRngState(const c10::IValue& state);

}  // namespace ddp::checkpoint
