// Random permutations equal to PyTorch's, without torch.
//
//   std::vector<int64_t> order = RandomPermutation(dataset.size(), /*seed=*/seed + epoch);
//
// Same result as Python's
//   torch.randperm(n, generator=torch.Generator().manual_seed(seed))
// so that a run in Python and one here see the same examples in the same order.
#pragma once

#include <cstdint>
#include <vector>

namespace ddp::data {

// A permutation of 0 … n-1; n >= 0. Like PyTorch's CPU generator, uses only the low 32 bits of
// `seed`. Takes 8n bytes. Thread-safe.
std::vector<int64_t> RandomPermutation(int64_t n, uint64_t seed);

namespace internal {

// PyTorch's two algorithms, and the length from which it uses the second: there the first one's
// 32-bit random numbers are no longer close to uniform.
inline constexpr int64_t kLongPermutation = 0xffffffff / 20;
std::vector<int64_t> ShortPermutation(int64_t n, uint64_t seed);
std::vector<int64_t> LongPermutation(int64_t n, uint64_t seed);

}  // namespace internal

}  // namespace ddp::data
