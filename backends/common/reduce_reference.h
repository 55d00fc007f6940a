// For tests: a reference implementation of reductions of single elements, slow and independent of
// the kernels.
//
//   const RefBFloat16 sum = Reference<RefBFloat16>({DType::kBFloat16, ReduceOp::kSum}, {a, b, c});
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "backends/common/reduce_kernels.h"

namespace ddp::backends {

// A floating-point format of 16 bits, converted by arithmetic on its definition.
template <int kExponentBits, int kMantissaBits>
struct Small {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;
  static constexpr int kInfinity = ((1 << kExponentBits) - 1) << kMantissaBits;

  uint16_t bits;

  float Value() const {
    const float sign = bits & 0x8000 ? -1 : 1;
    const int magnitude = bits & 0x7fff;
    const int mantissa = magnitude & ((1 << kMantissaBits) - 1);
    const int exponent = magnitude >> kMantissaBits;
    if (magnitude > kInfinity) return std::numeric_limits<float>::quiet_NaN();
    if (magnitude == kInfinity) return sign * std::numeric_limits<float>::infinity();
    if (exponent == 0) return sign * std::ldexp(mantissa, kMinExponent - kMantissaBits);
    return sign * std::ldexp(mantissa + (1 << kMantissaBits), exponent - kBias - kMantissaBits);
  }

  // The unit in the last place (ulp) at this magnitude.
  static double Unit(double magnitude) {
    int exponent;
    std::frexp(magnitude, &exponent);
    return std::ldexp(1.0, std::max(exponent - 1, kMinExponent) - kMantissaBits);
  }

  static Small Nearest(float value) {
    if (std::isnan(value)) return {static_cast<uint16_t>(kInfinity + 1)};
    const int sign = std::signbit(value) ? 0x8000 : 0;
    double magnitude = std::fabs(static_cast<double>(value));
    int bits = kInfinity;
    if (std::isfinite(magnitude)) {
      const double unit = Unit(magnitude);
      magnitude = std::nearbyint(magnitude / unit) * unit;  // To even, as by default.
      const double smallest_normal = std::ldexp(1.0, kMinExponent);
      if (magnitude < smallest_normal) {
        bits = static_cast<int>(std::ldexp(magnitude, kMantissaBits - kMinExponent));
      } else {
        int exponent;
        const double fraction = 2 * std::frexp(magnitude, &exponent) - 1;
        const int biased = exponent - 1 + kBias;
        bits = std::min(kInfinity, static_cast<int>(std::ldexp(biased + fraction, kMantissaBits)));
      }
    }
    return {static_cast<uint16_t>(sign | bits)};
  }
};
using RefHalf = Small<5, 10>;
using RefBFloat16 = Small<8, 7>;

template <typename T>
constexpr bool kIsSmall = std::is_same_v<T, RefHalf> || std::is_same_v<T, RefBFloat16>;
template <typename T>
constexpr bool kIsComplex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

// The reduction of one element of each source.
template <typename T>
T Reference(const Reduction& reduction, const std::vector<T>& values) {
  const ReduceOp op = reduction.op;
  if constexpr (kIsSmall<T>) {
    std::vector<float> wide;
    for (T value : values) wide.push_back(value.Value());
    return T::Nearest(Reference<float>(reduction, wide));
  } else if constexpr (kIsComplex<T>) {
    using E = typename T::value_type;
    if (op != ReduceOp::kProduct) {
      std::vector<E> real, imaginary;
      for (T value : values) real.push_back(value.real()), imaginary.push_back(value.imag());
      return {Reference(reduction, real), Reference(reduction, imaginary)};
    }
    T result = values[0];
    for (size_t s = 1; s < values.size(); ++s) {
      // Volatile: rounded by every step.
      volatile E ac = result.real() * values[s].real(), bd = result.imag() * values[s].imag();
      volatile E ad = result.real() * values[s].imag(), bc = result.imag() * values[s].real();
      result = {ac - bd, ad + bc};
    }
    return result;
  } else if constexpr (std::is_same_v<T, bool>) {
    const auto count = std::count(values.begin(), values.end(), true);
    const bool all = count == static_cast<ptrdiff_t>(values.size());
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMax:
      case ReduceOp::kBor:
        return count > 0;
      case ReduceOp::kBxor:
        return count % 2 == 1;
      default:
        return all;
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    volatile T result = values[0];
    for (size_t s = 1; s < values.size(); ++s) {
      volatile T value = values[s];
      if (op == ReduceOp::kProduct) {
        result = result * value;
      } else if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
        if (std::isnan(value) || std::isnan(result)) {
          result = std::numeric_limits<T>::quiet_NaN();
        } else {
          result = op == ReduceOp::kMin ? std::fmin(result, value) : std::fmax(result, value);
        }
      } else {
        result = result + value;
      }
    }
    if (op == ReduceOp::kAvg) result = result / static_cast<T>(reduction.factor);
    return result;
  } else {
    __int128 result = values[0];
    for (size_t s = 1; s < values.size(); ++s) {
      const __int128 value = values[s];
      switch (op) {
        case ReduceOp::kProduct:
          result = static_cast<T>(result * value);
          break;
        case ReduceOp::kMin:
          result = std::min(result, value);
          break;
        case ReduceOp::kMax:
          result = std::max(result, value);
          break;
        case ReduceOp::kBand:
          result &= value;
          break;
        case ReduceOp::kBor:
          result |= value;
          break;
        case ReduceOp::kBxor:
          result ^= value;
          break;
        default:
          result += value;
      }
    }
    if (op == ReduceOp::kAvg) {
      result = static_cast<T>(result) / static_cast<__int128>(reduction.factor);
    }
    return static_cast<T>(result);
  }
}

}  // namespace ddp::backends
