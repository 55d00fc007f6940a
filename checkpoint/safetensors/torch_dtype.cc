#include "checkpoint/safetensors/torch_dtype.h"

#include <utility>

namespace ddp::checkpoint::safetensors {
namespace {

using c10::ScalarType;

constexpr std::pair<Dtype, ScalarType> kPairs[] = {
    {Dtype::kBool, ScalarType::Bool},
    {Dtype::kF4, ScalarType::Float4_e2m1fn_x2},
    {Dtype::kU8, ScalarType::Byte},
    {Dtype::kI8, ScalarType::Char},
    {Dtype::kF8E5M2, ScalarType::Float8_e5m2},
    {Dtype::kF8E4M3, ScalarType::Float8_e4m3fn},
    {Dtype::kF8E8M0, ScalarType::Float8_e8m0fnu},
    {Dtype::kF8E4M3Fnuz, ScalarType::Float8_e4m3fnuz},
    {Dtype::kF8E5M2Fnuz, ScalarType::Float8_e5m2fnuz},
    {Dtype::kI16, ScalarType::Short},
    {Dtype::kU16, ScalarType::UInt16},
    {Dtype::kF16, ScalarType::Half},
    {Dtype::kBF16, ScalarType::BFloat16},
    {Dtype::kI32, ScalarType::Int},
    {Dtype::kU32, ScalarType::UInt32},
    {Dtype::kF32, ScalarType::Float},
    {Dtype::kC64, ScalarType::ComplexFloat},
    {Dtype::kF64, ScalarType::Double},
    {Dtype::kI64, ScalarType::Long},
    {Dtype::kU64, ScalarType::UInt64},
};

}  // namespace

std::optional<Dtype> DtypeOf(ScalarType dtype) {
  for (const auto& [file, torch] : kPairs) {
    if (torch == dtype) return file;
  }
  return std::nullopt;
}

std::optional<ScalarType> ScalarTypeOf(Dtype dtype) {
  for (const auto& [file, torch] : kPairs) {
    if (file == dtype) return torch;
  }
  return std::nullopt;
}

ScalarType BitsTypeOf(ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return ScalarType::Byte;
    case 2:
      return ScalarType::Short;
    case 4:
      return ScalarType::Int;
    default:
      return ScalarType::Long;
  }
}

std::optional<std::vector<int64_t>> FileShape(Dtype dtype, absl::Span<const int64_t> sizes) {
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  if (dtype != Dtype::kF4) return shape;
  if (shape.empty() || __builtin_mul_overflow(shape.back(), 2, &shape.back())) return std::nullopt;
  return shape;
}

std::optional<std::vector<int64_t>> TorchShape(Dtype dtype, absl::Span<const int64_t> shape) {
  std::vector<int64_t> sizes(shape.begin(), shape.end());
  if (dtype != Dtype::kF4) return sizes;
  if (sizes.empty() || sizes.back() % 2 != 0) return std::nullopt;
  sizes.back() /= 2;
  return sizes;
}

}  // namespace ddp::checkpoint::safetensors
