// Element-wise reductions of arrays of the same length: the arithmetic of the reducing collectives
// of the backends shm and mpi. No torch, no allocations, no locks.
//
//   Reduction sum{.dtype = DType::kBFloat16, .op = ReduceOp::kSum};
//   DDP_RETURN_IF_ERROR(Check(sum));
//   const ReduceFn reduce = Resolve(sum);  // Once per collective; a call then costs no dispatch.
//   reduce(dsts, /*num_dsts=*/2, srcs, /*num_srcs=*/2, count);
//
// The sources are combined in the order given, element by element, whatever the length, the
// alignment and the processor: the same inputs give the same bits on every rank and in every run.
//  - Half and bfloat16 are widened to float, combined there, and rounded once, at the end, to the
//    nearest even.
//  - Integers wrap around; an average of them truncates towards zero, as NCCL's does.
//  - For bools, a sum is a logical or, a product a logical and.
//  - A minimum or maximum with a NaN is a NaN, as in torch.minimum.
//
// Thread safety: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp::backends {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kHalf,
  kBFloat16,
  kFloat,
  kDouble,
  kComplexFloat,
  kComplexDouble,
};

// Bytes of one element.
size_t ElementSize(DType dtype);

// Returns the name as torch prints it: "bfloat16", "complex64".
absl::string_view Name(DType dtype);

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
};

// Returns c10d's name of it: "SUM".
absl::string_view Name(ReduceOp op);

struct Reduction {
  DType dtype = DType::kFloat;
  ReduceOp op = ReduceOp::kSum;
  // kAvg: the divisor of the sum, usually the world size. Applied in the precision of the sum:
  // float for half and bfloat16.
  double factor = 1;
};

// InvalidArgument, with what is possible instead, for a reduction that has no meaning: bitwise
// operations on floating point, minimum or maximum of complex numbers, an average of bools, an
// average whose factor is not positive or, for integers, not a whole number.
absl::Status Check(const Reduction& reduction);

// The vector instruction sets that the kernels are compiled for. kBaseline is available on every
// processor of the architecture: 128 bits, SSE2 or NEON.
enum class VectorUnit : uint8_t { kBaseline, kAvx2, kAvx512 };

// The ones that this processor supports, the fastest last.
const std::vector<VectorUnit>& VectorUnits();

// Reduction::factor in the types that kernels use.
struct ReduceConstants {
  float as_float = 1;
  double as_double = 1;
  int64_t as_integer = 1;
};

using ReduceKernel = void (*)(const ReduceConstants& constants, void* const* dsts, int num_dsts,
                              const void* const* srcs, int num_srcs, size_t count);

// A reduction bound to its kernel. Small and copyable.
class ReduceFn {
 public:
  // dsts[d][i] = op over s = 0, 1, ..., num_srcs - 1 of srcs[s][i], for every d and every i below
  // `count`. There is at least one source. A destination may be the very pointer of a source;
  // other than that nothing overlaps. Pointers are aligned to the element; cache lines are faster.
  void operator()(void* const* dsts, int num_dsts, const void* const* srcs, int num_srcs,
                  size_t count) const {
    kernel_(constants_, dsts, num_dsts, srcs, num_srcs, count * scale_);
  }

 private:
  friend ReduceFn Resolve(const Reduction& reduction, VectorUnit unit);
  ReduceFn(ReduceKernel kernel, size_t scale, const ReduceConstants& constants)
      : kernel_(kernel), scale_(scale), constants_(constants) {}

  ReduceKernel kernel_;
  size_t scale_;  // Elements of the kernel per element of the reduction: 2 for a complex sum.
  ReduceConstants constants_;
};

// The fastest kernel of this processor for `reduction`, which must pass Check.
ReduceFn Resolve(const Reduction& reduction);

// The kernel for `unit`, which must be one of VectorUnits(). For tests and benchmarks.
ReduceFn Resolve(const Reduction& reduction, VectorUnit unit);

// Resolves and calls.
void Reduce(const Reduction& reduction, void* const* dsts, int num_dsts, const void* const* srcs,
            int num_srcs, size_t count);

}  // namespace ddp::backends
