// Selects the cases to run. The full product of a case's dimensions has millions of cases, so tests
// run a pairwise cover: each pair of values occurs in some case.
//
//   for (const Case& c : PairwiseCover()) …     // about 1,300
//   for (int64_t i = 0; i < FullProductSize(); ++i) {
//     if (std::optional<Case> c = FullProduct(i)) …
//   }
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "backends/conformance/case.h"

namespace ddp::backends::conformance {

absl::Span<const int> AllWorldSizes();

// Sizes to test, in elements of this dtype: 0, 1, 7, and just below, at and just above the sizes in
// bytes at which an algorithm may change (56 B, 1, 8, 32, 128 and 256 KB, 1 MB); and 1.5 MB.
std::vector<int64_t> Counts(c10::ScalarType dtype);

// Every pair of values of two dimensions, (operation and reduction), dtype, size, layout, mode,
// scope and world size, occurs in a case, if c10d defines it and all ranks' tensors together are
// below `max_bytes`. Deterministic; without duplicates.
std::vector<Case> PairwiseCover(int64_t max_bytes = int64_t{16} << 20);

// All combinations, by index; nullopt for those that c10d does not define.
int64_t FullProductSize();
std::optional<Case> FullProduct(int64_t index);

// Bytes of all ranks' tensors together.
int64_t TotalBytes(const Case& c);

}  // namespace ddp::backends::conformance
