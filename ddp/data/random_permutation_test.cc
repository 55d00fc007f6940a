#include "ddp/data/random_permutation.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace ddp::data {
namespace {

using Order = std::vector<int64_t>;

// FNV-1a over the numbers, one step each.
uint64_t Hash(const Order& order) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i : order) hash = (hash ^ static_cast<uint64_t>(i)) * 0x100000001b3;
  return hash;
}

// Expected values: torch 2.11, torch.randperm(n, generator=torch.Generator().manual_seed(seed)).
TEST(RandomPermutationTest, EqualsTorchRandperm) {
  EXPECT_EQ(RandomPermutation(0, 0), Order());
  EXPECT_EQ(RandomPermutation(1, 0), Order({0}));
  EXPECT_EQ(RandomPermutation(10, 0), Order({4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  EXPECT_EQ(RandomPermutation(10, 1), Order({5, 6, 1, 2, 0, 8, 9, 3, 7, 4}));
  EXPECT_EQ(Hash(RandomPermutation(60000, 0)), 0x216d0369b8490487);
  EXPECT_EQ(Hash(RandomPermutation(60000, 7)), 0xaaf21e7fe715a71b);
}

TEST(RandomPermutationTest, SeedsBeyond32BitsAreTorchsToo) {
  EXPECT_EQ(RandomPermutation(10, (uint64_t{1} << 32) + 1), RandomPermutation(10, 1));
  EXPECT_EQ(RandomPermutation(10, 12345678901), Order({6, 0, 5, 4, 2, 7, 8, 3, 9, 1}));
  EXPECT_EQ(RandomPermutation(10, static_cast<uint64_t>(-1)),
            Order({1, 4, 6, 2, 0, 5, 8, 7, 9, 3}));
}

// torch uses this algorithm from 214,748,364 elements on; equality there was checked by hand.
// Expected values: the same loop in Python over draws of torch's generator.
TEST(RandomPermutationTest, LongPermutationDrawsAsTorchDoes) {
  EXPECT_EQ(internal::LongPermutation(10, 0), Order({8, 2, 6, 3, 5, 1, 0, 9, 7, 4}));
  EXPECT_EQ(internal::LongPermutation(10, 1), Order({8, 4, 2, 0, 7, 5, 3, 6, 9, 1}));
}

TEST(RandomPermutationTest, BothAlgorithmsPermute) {
  for (int64_t n = 0; n <= 50; ++n) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      for (Order order :
           {internal::ShortPermutation(n, seed), internal::LongPermutation(n, seed)}) {
        std::sort(order.begin(), order.end());
        for (int64_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i) << n << " " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace ddp::data
