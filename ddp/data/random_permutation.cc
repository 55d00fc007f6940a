#include "ddp/data/random_permutation.h"

#include <numeric>
#include <random>
#include <utility>

namespace ddp::data {
namespace internal {

// Fisher-Yates from the front; draw i picks one of the n-i that are left.
std::vector<int64_t> ShortPermutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::mt19937 generator(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < n - 1; ++i) {
    const int64_t z = static_cast<int64_t>(generator()) % (n - i);
    std::swap(order[i], order[i + z]);
  }
  return order;
}

// Fisher-Yates from the inside out; a draw is two outputs, the high half first.
std::vector<int64_t> LongPermutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(n);
  std::mt19937 generator(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t high = generator();
    const uint64_t low = generator();
    const uint64_t z = (high << 32 | low) % static_cast<uint64_t>(i + 1);
    order[i] = order[z];
    order[z] = i;
  }
  return order;
}

}  // namespace internal

std::vector<int64_t> RandomPermutation(int64_t n, uint64_t seed) {
  return n < internal::kLongPermutation ? internal::ShortPermutation(n, seed)
                                        : internal::LongPermutation(n, seed);
}

}  // namespace ddp::data
