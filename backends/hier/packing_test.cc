#include "backends/hier/packing.h"

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::backends::hier {
namespace {

template <typename Bits>
class PackingTest : public testing::Test {
 protected:
  static constexpr int kBytes = sizeof(Bits);

  static std::vector<uint8_t> Packed(const std::vector<Bits>& numbers) {
    std::vector<uint8_t> packed(MaxPackedBytes(numbers.size(), kBytes));
    const size_t size = Pack(numbers.data(), numbers.size(), kBytes, packed.data());
    EXPECT_LE(size, packed.size());
    packed.resize(size);
    return packed;
  }

  static void ExpectSurvives(const std::vector<Bits>& numbers) {
    const std::vector<uint8_t> packed = Packed(numbers);
    std::vector<Bits> copy(numbers.size(), 1);
    ASSERT_TRUE(Unpack(packed.data(), packed.size(), copy.size(), kBytes, copy.data()));
    EXPECT_EQ(copy, numbers);
  }

  // The bits of numbers around `scale`, as a gradient has them.
  static std::vector<Bits> Normal(size_t count, float scale = 1e-3f) {
    std::mt19937 generator(count);
    std::normal_distribution<float> normal(0, scale);
    std::vector<Bits> numbers(count);
    for (Bits& number : numbers) {
      const float value = normal(generator);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      number = static_cast<Bits>(bits >> (32 - 8 * kBytes));
    }
    return numbers;
  }
};
using Formats = testing::Types<uint32_t, uint16_t>;
TYPED_TEST_SUITE(PackingTest, Formats);

TYPED_TEST(PackingTest, AnyBitsSurvive) {
  std::mt19937_64 generator(1);
  for (size_t count : {0, 1, 255, 256, 257, 1000, 4096}) {
    std::vector<TypeParam> numbers(count);
    for (TypeParam& number : numbers) number = static_cast<TypeParam>(generator());
    this->ExpectSurvives(numbers);
    this->ExpectSurvives(this->Normal(count));
  }
}

TYPED_TEST(PackingTest, EachExponentAndSignSurvivesAmongOthers) {
  constexpr int kExponentShift = 8 * sizeof(TypeParam) - 9;
  for (int largest : {0, 1, 13, 14, 15, 127, 254, 255}) {
    std::vector<TypeParam> numbers;
    for (int exponent = 0; exponent <= largest; ++exponent) {
      for (int sign : {0, 1}) {
        for (int mantissa : {0, 1, (1 << kExponentShift) - 1}) {
          numbers.push_back(
              static_cast<TypeParam>((sign << 8 | exponent) << kExponentShift | mantissa));
        }
      }
    }
    this->ExpectSurvives(numbers);
  }
}

TYPED_TEST(PackingTest, GradientsShrink) {
  const size_t count = 100'000;
  const auto bytes = static_cast<double>(count * sizeof(TypeParam));
  const double expected = sizeof(TypeParam) == 4 ? 0.875 : 0.75;
  EXPECT_NEAR(this->Packed(this->Normal(count)).size() / bytes, expected, 0.01);
  EXPECT_NEAR(this->Packed(std::vector<TypeParam>(count)).size() / bytes, expected, 0.01);
}

TYPED_TEST(PackingTest, WhatIsCutOrTooLongIsRefused) {
  const std::vector<TypeParam> numbers = this->Normal(600, 1e10f);
  std::vector<uint8_t> packed = this->Packed(numbers);
  packed.push_back(0);
  std::vector<TypeParam> copy(numbers.size());
  for (size_t size = 0; size <= packed.size(); ++size) {
    EXPECT_EQ(Unpack(packed.data(), size, copy.size(), sizeof(TypeParam), copy.data()),
              size + 1 == packed.size())
        << size;
  }
}

}  // namespace
}  // namespace ddp::backends::hier
