// The state of torch's default random generator of a device, as Python's torch.get_rng_state() and
// torch.cuda.get_rng_state() give it.
//
//   state.root.insert("rng", RngState());
//   DDP_RETURN_IF_ERROR(LoadRngState(state.root.at("rng")));
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include "absl/status/status.h"

namespace ddp::checkpoint {

// A new uint8 tensor in CPU memory: [5056] for the CPU, [16] for CUDA. Thread-safe. Throws
// c10::Error if this build or machine does not have the device.
at::Tensor RngState(c10::Device device = c10::kCPU);

// OK if LoadRngState would restore `state`. Changes nothing. Thread-safe.
absl::Status CheckRngState(const c10::IValue& state, c10::Device device = c10::kCPU);

// Restores it. InvalidArgument if `state` is not such a tensor; the generator is then unchanged.
// Thread-safe.
absl::Status LoadRngState(const c10::IValue& state, c10::Device device = c10::kCPU);

}  // namespace ddp::checkpoint
