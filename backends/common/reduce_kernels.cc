#include "backends/common/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace ddp::backends {
namespace {

enum class Kind { kBool, kInteger, kFloating, kComplex };

struct DTypeInfo {
  absl::string_view name;
  uint8_t size;
  Kind kind;
};

// The entries are in the order of DType.
constexpr DTypeInfo kDTypes[] = {
    {"bool", 1, Kind::kBool},           {"uint8", 1, Kind::kInteger},
    {"int8", 1, Kind::kInteger},        {"uint16", 2, Kind::kInteger},
    {"int16", 2, Kind::kInteger},       {"uint32", 4, Kind::kInteger},
    {"int32", 4, Kind::kInteger},       {"uint64", 8, Kind::kInteger},
    {"int64", 8, Kind::kInteger},       {"float16", 2, Kind::kFloating},
    {"bfloat16", 2, Kind::kFloating},   {"float32", 4, Kind::kFloating},
    {"float64", 8, Kind::kFloating},    {"complex64", 8, Kind::kComplex},
    {"complex128", 16, Kind::kComplex},
};

// The names are in the order of ReduceOp.
constexpr absl::string_view kOps[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

const DTypeInfo& Info(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

// The operations of the kernels, to which each ReduceOp is mapped by dtype.
enum class Operation {
  kSum,
  kSumThenMultiply,
  kSumThenDivide,
  kProduct,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
};

template <typename E>
E FloatingConstant(const ReduceConstants& constants) {
  if constexpr (std::is_same_v<E, double>) {
    return constants.as_double;
  } else {
    return constants.as_float;
  }
}

namespace baseline {
#define DDP_VECTOR_BYTES 16
#include "backends/common/reduce_kernels_loops.inc"
#undef DDP_VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__)

#if defined(__clang__)
#define DDP_BEGIN_TARGET(options) \
  DDP_PRAGMA(clang attribute push(__attribute__((target(options))), apply_to = function))
#define DDP_END_TARGET _Pragma("clang attribute pop")
#else
#define DDP_BEGIN_TARGET(options) _Pragma("GCC push_options") DDP_PRAGMA(GCC target(options))
#define DDP_END_TARGET _Pragma("GCC pop_options")
#endif
#define DDP_PRAGMA(text) _Pragma(#text)

DDP_BEGIN_TARGET("avx2,f16c")
namespace avx2 {
#define DDP_VECTOR_BYTES 32
#include "backends/common/reduce_kernels_loops.inc"
#undef DDP_VECTOR_BYTES
}  // namespace avx2
DDP_END_TARGET

DDP_BEGIN_TARGET("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define DDP_VECTOR_BYTES 64
#include "backends/common/reduce_kernels_loops.inc"
#undef DDP_VECTOR_BYTES
}  // namespace avx512
DDP_END_TARGET

#endif

ReduceKernel Find(DType dtype, Operation operation, VectorUnit unit) {
  switch (unit) {
#if defined(__x86_64__)
    case VectorUnit::kAvx2:
      return avx2::Find(dtype, operation);
    case VectorUnit::kAvx512:
      return avx512::Find(dtype, operation);
#endif
    default:
      return baseline::Find(dtype, operation);
  }
}

// Rarely used, so not optimised.
template <typename E>
void ComplexProduct(const ReduceConstants&, void* const* dsts, int num_dsts,
                    const void* const* srcs, int num_srcs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    E real = static_cast<const E*>(srcs[0])[2 * i];
    E imaginary = static_cast<const E*>(srcs[0])[2 * i + 1];
    for (int s = 1; s < num_srcs; ++s) {
      const E r = static_cast<const E*>(srcs[s])[2 * i];
      const E m = static_cast<const E*>(srcs[s])[2 * i + 1];
      const E product = real * r - imaginary * m;
      imaginary = real * m + imaginary * r;
      real = product;
    }
    for (int d = 0; d < num_dsts; ++d) {
      static_cast<E*>(dsts[d])[2 * i] = real;
      static_cast<E*>(dsts[d])[2 * i + 1] = imaginary;
    }
  }
}

bool IsPowerOfTwo(double value) {
  int exponent;
  return std::frexp(value, &exponent) == 0.5;
}

Operation OperationOf(const Reduction& reduction) {
  const bool is_bool = reduction.dtype == DType::kBool;
  switch (reduction.op) {
    case ReduceOp::kSum:
      return is_bool ? Operation::kOr : Operation::kSum;
    case ReduceOp::kAvg: {
      // For a power of two the faster multiplication gives the same bits.
      const bool multiply = Info(reduction.dtype).kind != Kind::kInteger &&
                            IsPowerOfTwo(reduction.factor) && reduction.factor >= 1 &&
                            reduction.factor < 0x1p64;
      return multiply ? Operation::kSumThenMultiply : Operation::kSumThenDivide;
    }
    case ReduceOp::kProduct:
      return is_bool ? Operation::kAnd : Operation::kProduct;
    case ReduceOp::kMin:
      return is_bool ? Operation::kAnd : Operation::kMin;
    case ReduceOp::kMax:
      return is_bool ? Operation::kOr : Operation::kMax;
    case ReduceOp::kBand:
      return Operation::kAnd;
    case ReduceOp::kBor:
      return Operation::kOr;
    case ReduceOp::kBxor:
      return Operation::kXor;
  }
  return Operation::kSum;
}

}  // namespace

size_t ElementSize(DType dtype) { return Info(dtype).size; }

absl::string_view Name(DType dtype) { return Info(dtype).name; }

absl::string_view Name(ReduceOp op) { return kOps[static_cast<size_t>(op)]; }

absl::Status Check(const Reduction& reduction) {
  const Kind kind = Info(reduction.dtype).kind;
  const auto invalid = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(reduction.op), " of ", Name(reduction.dtype), ": ", why));
  };
  switch (reduction.op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return absl::OkStatus();
    case ReduceOp::kAvg:
      if (kind == Kind::kBool) return invalid("bools have no average; use SUM, their or");
      if (!(reduction.factor > 0 && std::isfinite(reduction.factor))) {
        return invalid(absl::StrCat("the factor ", reduction.factor,
                                    " must be positive: the number of ranks"));
      }
      if (kind == Kind::kInteger && !(reduction.factor == std::floor(reduction.factor) &&
                                      reduction.factor < std::ldexp(1.0, 63))) {
        return invalid(absl::StrCat("the factor ", reduction.factor,
                                    " must be a whole number: the number of ranks"));
      }
      return absl::OkStatus();
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (kind == Kind::kComplex) return invalid("complex numbers have no order");
      return absl::OkStatus();
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if (kind != Kind::kBool && kind != Kind::kInteger) {
        return invalid("bitwise operations take integers and bools");
      }
      return absl::OkStatus();
  }
  return absl::InternalError("no such ReduceOp");
}

const std::vector<VectorUnit>& VectorUnits() {
  static const std::vector<VectorUnit>& units = *new std::vector<VectorUnit>([] {
    std::vector<VectorUnit> found = {VectorUnit::kBaseline};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      found.push_back(VectorUnit::kAvx2);
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back(VectorUnit::kAvx512);
      }
    }
#endif
    return found;
  }());
  return units;
}

ReduceFn Resolve(const Reduction& reduction, VectorUnit unit) {
  ReduceConstants constants;
  const Operation operation = OperationOf(reduction);
  constants.as_double =
      operation == Operation::kSumThenMultiply ? 1 / reduction.factor : reduction.factor;
  constants.as_float = static_cast<float>(constants.as_double);
  if (Info(reduction.dtype).kind == Kind::kInteger && operation == Operation::kSumThenDivide) {
    constants.as_integer = static_cast<int64_t>(reduction.factor);
  }
  switch (operation) {
    case Operation::kAnd:
    case Operation::kOr:
    case Operation::kXor:
      return ReduceFn(Find(DType::kUInt8, operation, unit), ElementSize(reduction.dtype),
                      constants);
    default:
      break;
  }
  if (reduction.dtype == DType::kComplexFloat) {
    if (operation == Operation::kProduct) return ReduceFn(&ComplexProduct<float>, 1, constants);
    return ReduceFn(Find(DType::kFloat, operation, unit), 2, constants);
  }
  if (reduction.dtype == DType::kComplexDouble) {
    if (operation == Operation::kProduct) return ReduceFn(&ComplexProduct<double>, 1, constants);
    return ReduceFn(Find(DType::kDouble, operation, unit), 2, constants);
  }
  return ReduceFn(Find(reduction.dtype, operation, unit), 1, constants);
}

ReduceFn Resolve(const Reduction& reduction) { return Resolve(reduction, VectorUnits().back()); }

void Reduce(const Reduction& reduction, void* const* dsts, int num_dsts, const void* const* srcs,
            int num_srcs, size_t count) {
  Resolve(reduction)(dsts, num_dsts, srcs, num_srcs, count);
}

}  // namespace ddp::backends
