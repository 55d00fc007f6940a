// The format's element types as torch's, both ways.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "checkpoint/safetensors/header.h"

namespace ddp::checkpoint::safetensors {

// nullopt: the format has no such type (complex of halves or doubles, quantized types).
std::optional<Dtype> DtypeOf(c10::ScalarType dtype);

// nullopt: torch has no such type (F6).
std::optional<c10::ScalarType> ScalarTypeOf(Dtype dtype);

// A type as wide as `dtype` that every operation knows, for moving bits.
c10::ScalarType BitsTypeOf(c10::ScalarType dtype);

// torch has two numbers of type F4 in one element, and the format counts them one by one: the last
// size differs by a factor of two. Other shapes are equal. nullopt if the shape has no last size,
// or an odd one.
std::optional<std::vector<int64_t>> FileShape(Dtype dtype, absl::Span<const int64_t> sizes);
std::optional<std::vector<int64_t>> TorchShape(Dtype dtype, absl::Span<const int64_t> shape);

}  // namespace ddp::checkpoint::safetensors
