// Which cases are run: the full product of a case's dimensions is millions, so what runs at every
// commit is a cover of all pairs.
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

// Sizes worth a case, as elements of this dtype: none, one, seven, and below, at and above the
// sizes in bytes at which an algorithm may change (56 B, 1 KB, 32 KB, 256 KB, 1 MB).
std::vector<int64_t> Counts(c10::ScalarType dtype);

// Every pair of values of two dimensions, (operation and reduction), dtype, size, layout, mode,
// scope and world size, occurs in a case, so far as c10d gives it a meaning and all ranks' tensors
// together stay below `max_bytes`. The same list every time; no case twice.
std::vector<Case> PairwiseCover(int64_t max_bytes = int64_t{16} << 20);

// All combinations, by number; nothing for those that c10d gives no meaning to.
int64_t FullProductSize();
std::optional<Case> FullProduct(int64_t index);

// Bytes of all ranks' tensors together.
int64_t TotalBytes(const Case& c);

}  // namespace ddp::backends::conformance
