// Memory for large tensors that are filled at once, as a load and a copy of a state do.
//
//   const at::Tensor tensor = EmptyLarge({1024, 1024}, at::kFloat);   // as at::empty
//
// The system gives memory of malloc in pages of 4 KiB, when each is written first, which takes
// several times as long as the copy into it. Tensors of kLarge bytes or more are in huge pages
// where the system has them (transparent_hugepage: always or madvise). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace ddp::checkpoint {

inline constexpr size_t kLarge = 4 << 20;

// Returns a contiguous tensor on the CPU; its values are undefined. Throws as at::empty if there is
// not enough memory.
at::Tensor EmptyLarge(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace ddp::checkpoint
