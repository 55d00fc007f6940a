#include "backends/common/reduce_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/common/reduce_reference.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

using ::testing::HasSubstr;

// NaNs have no bits of their own, and a minimum of 0 and -0 is either.
template <typename T>
bool Same(T a, T b, ReduceOp op) {
  if constexpr (kIsComplex<T>) {
    return Same(a.real(), b.real(), op) && Same(a.imag(), b.imag(), op);
  } else if constexpr (kIsSmall<T>) {
    return Same(a.Value(), b.Value(), op);
  } else {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
      if (op != ReduceOp::kMin && op != ReduceOp::kMax && std::signbit(a) != std::signbit(b)) {
        return false;
      }
    }
    return a == b;
  }
}

template <typename T>
std::string Print(T value) {
  if constexpr (kIsComplex<T>) {
    return absl::StrCat(value.real(), "+", value.imag(), "i");
  } else if constexpr (kIsSmall<T>) {
    return absl::StrCat(value.Value(), " (", absl::Hex(value.bits), ")");
  } else {
    return absl::StrCat(+value);
  }
}

template <typename T>
T Random(std::mt19937_64& random) {
  if constexpr (std::is_same_v<T, bool>) {
    return random() % 4 != 0;
  } else if constexpr (kIsComplex<T>) {
    using E = typename T::value_type;
    const E real = Random<E>(random);
    return {real, Random<E>(random)};
  } else if constexpr (kIsSmall<T>) {
    // All bits for everything there is; near 1 for what does not overflow.
    if (random() % 2 == 0) return {static_cast<uint16_t>(random())};
    return T::Nearest(std::uniform_real_distribution<float>(-2, 2)(random));
  } else if constexpr (std::is_floating_point_v<T>) {
    using Limits = std::numeric_limits<T>;
    const T specials[] = {0,
                          -T{0},
                          Limits::infinity(),
                          -Limits::infinity(),
                          Limits::quiet_NaN(),
                          Limits::denorm_min(),
                          -5 * Limits::denorm_min(),
                          Limits::min(),
                          Limits::max(),
                          Limits::lowest(),
                          1,
                          Limits::epsilon() / 2};
    if (random() % 8 == 0) return specials[random() % std::size(specials)];
    return std::uniform_real_distribution<T>(-2, 2)(random);
  } else {
    return static_cast<T>(random() % 3 == 0 ? random() % 5 : random());
  }
}

// Calls f.template operator()<T>(dtype) for every data type.
template <typename F>
void ForEachDType(F f) {
  f.template operator()<bool>(DType::kBool);
  f.template operator()<uint8_t>(DType::kUInt8);
  f.template operator()<int8_t>(DType::kInt8);
  f.template operator()<uint16_t>(DType::kUInt16);
  f.template operator()<int16_t>(DType::kInt16);
  f.template operator()<uint32_t>(DType::kUInt32);
  f.template operator()<int32_t>(DType::kInt32);
  f.template operator()<uint64_t>(DType::kUInt64);
  f.template operator()<int64_t>(DType::kInt64);
  f.template operator()<RefHalf>(DType::kHalf);
  f.template operator()<RefBFloat16>(DType::kBFloat16);
  f.template operator()<float>(DType::kFloat);
  f.template operator()<double>(DType::kDouble);
  f.template operator()<std::complex<float>>(DType::kComplexFloat);
  f.template operator()<std::complex<double>>(DType::kComplexDouble);
}

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct,
                                ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kBand,
                                ReduceOp::kBor, ReduceOp::kBxor};

std::string Describe(const Reduction& reduction, VectorUnit unit) {
  return absl::StrCat(Name(reduction.op), " of ", Name(reduction.dtype), " by ", reduction.factor,
                      " on unit ", static_cast<int>(unit));
}

// An array in the middle of bytes that must not change, `shift` elements off a 64-byte boundary.
template <typename T>
class Guarded {
 public:
  Guarded(const T* values, size_t count, size_t shift)
      : bytes_((count + shift) * sizeof(T) + 3 * kGuard, kFill), count_(count) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data()) + kGuard;
    offset_ = kGuard + (64 - address % 64) % 64 + shift * sizeof(T);
    if (count > 0) std::memcpy(data(), values, count * sizeof(T));
  }

  void* data() { return bytes_.data() + offset_; }

  T operator[](size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset_ + i * sizeof(T), sizeof(T));
    return value;
  }

  bool GuardsAreWhole() const {
    const auto whole = [](unsigned char byte) { return byte == kFill; };
    const auto begin = bytes_.begin() + offset_;
    return std::all_of(bytes_.begin(), begin, whole) &&
           std::all_of(begin + count_ * sizeof(T), bytes_.end(), whole);
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr unsigned char kFill = 0xa5;
  std::vector<unsigned char> bytes_;
  const size_t count_;
  size_t offset_;
};

// Reduces `inputs` into num_dsts arrays, of which the first `num_aliased` are sources, the last
// ones, and expects what the reference says.
template <typename T>
void Verify(const Reduction& reduction, VectorUnit unit, const std::vector<std::vector<T>>& inputs,
            const std::vector<T>& expected, int num_dsts, int num_aliased, size_t shift) {
  const size_t count = expected.size();
  const int num_srcs = static_cast<int>(inputs.size());
  std::vector<Guarded<T>> arrays;
  std::vector<T> input(count);
  for (int s = 0; s < num_srcs; ++s) {
    std::copy_n(inputs[s].begin(), count, input.begin());
    // std::vector<bool> has no data().
    std::vector<unsigned char> raw(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) {
      const T value = input[i];
      std::memcpy(raw.data() + i * sizeof(T), &value, sizeof(T));
    }
    arrays.emplace_back(reinterpret_cast<const T*>(raw.data()), count, s % 2 == 0 ? shift : 0);
  }
  const std::vector<unsigned char> zeros((count + 1) * sizeof(T));
  for (int d = num_aliased; d < num_dsts; ++d) {
    arrays.emplace_back(reinterpret_cast<const T*>(zeros.data()), count, d % 2 == 0 ? shift : 1);
  }
  std::vector<const void*> srcs;
  for (int s = 0; s < num_srcs; ++s) srcs.push_back(arrays[s].data());
  std::vector<void*> dsts;
  std::vector<int> owners;
  for (int d = 0; d < num_dsts; ++d) {
    owners.push_back(d < num_aliased ? num_srcs - 1 - d : num_srcs + d - num_aliased);
    dsts.push_back(arrays[owners.back()].data());
  }

  Resolve(reduction, unit)(dsts.data(), num_dsts, srcs.data(), num_srcs, count);

  const std::string what =
      absl::StrCat(Describe(reduction, unit), ", ", num_srcs, " sources, ", num_dsts,
                   " destinations, ", num_aliased, " aliased, shift ", shift, ", count ", count);
  for (const Guarded<T>& array : arrays) ASSERT_TRUE(array.GuardsAreWhole()) << what;
  for (int d = 0; d < num_dsts; ++d) {
    for (size_t i = 0; i < count; ++i) {
      const T actual = arrays[owners[d]][i];
      ASSERT_TRUE(Same<T>(actual, expected[i], reduction.op))
          << what << ", element " << i << " is " << Print<T>(actual) << " instead of "
          << Print<T>(expected[i]);
    }
  }
  for (int s = 0; s < num_srcs; ++s) {
    if (std::count(owners.begin(), owners.end(), s) > 0) continue;
    for (size_t i = 0; i < count; ++i) {
      const T actual = arrays[s][i], before = inputs[s][i];
      ASSERT_EQ(std::memcmp(&actual, &before, sizeof(T)), 0) << what << ", source " << s;
    }
  }
}

// Counts at the edges of every vector, and of the loops' steps of four.
std::set<size_t> Counts(size_t element_size) {
  std::set<size_t> counts = {0, 1, 2, 3, 1000 / element_size};
  for (size_t bytes = 8; bytes <= 512; bytes *= 2) {
    const size_t count = bytes / element_size;
    counts.insert({count > 0 ? count - 1 : 0, count, count + 1});
  }
  return counts;
}

class ReduceKernelsTest : public ::testing::TestWithParam<ReduceOp> {};

TEST_P(ReduceKernelsTest, MatchesReference) {
  constexpr int kMaxSources = 9;
  std::mt19937_64 random(4);
  ForEachDType([&]<typename T>(DType dtype) {
    constexpr double kFactors[] = {1, 2, 3, 300, 0.3};
    if (!Check({dtype, GetParam()}).ok()) return;
    for (size_t count : Counts(sizeof(T))) {
      for (int num_srcs = 1; num_srcs <= kMaxSources; ++num_srcs) {
        Reduction reduction{dtype, GetParam(), kFactors[random() % std::size(kFactors)]};
        if (!Check(reduction).ok()) reduction.factor = 4;  // No 0.3 for integers.
        std::vector<std::vector<T>> inputs(num_srcs);
        for (auto& input : inputs) {
          for (size_t i = 0; i < count; ++i) input.push_back(Random<T>(random));
        }
        std::vector<T> expected(count);
        for (size_t i = 0; i < count; ++i) {
          std::vector<T> values;
          for (const auto& input : inputs) values.push_back(input[i]);
          expected[i] = Reference<T>(reduction, values);
        }
        const int num_dsts = 1 + static_cast<int>(random() % 4);
        const int num_aliased = static_cast<int>(random() % (std::min(num_dsts, num_srcs) + 1));
        const size_t shift = random() % 4;
        for (VectorUnit unit : VectorUnits()) {
          Verify<T>(reduction, unit, inputs, expected, num_dsts, num_aliased, shift);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

// The loop of its own for two ranks that write both their arrays.
TEST_P(ReduceKernelsTest, MatchesReferenceInPlaceOfTwoSources) {
  std::mt19937_64 random(5);
  ForEachDType([&]<typename T>(DType dtype) {
    const Reduction reduction{dtype, GetParam(), 2};
    if (!Check(reduction).ok()) return;
    for (size_t count : Counts(sizeof(T))) {
      std::vector<std::vector<T>> inputs(2);
      std::vector<T> expected;
      for (size_t i = 0; i < count; ++i) {
        for (auto& input : inputs) input.push_back(Random<T>(random));
        expected.push_back(Reference<T>(reduction, {inputs[0][i], inputs[1][i]}));
      }
      for (VectorUnit unit : VectorUnits()) {
        for (int num_aliased : {0, 1, 2}) {
          Verify<T>(reduction, unit, inputs, expected, 2, num_aliased, /*shift=*/0);
          Verify<T>(reduction, unit, inputs, expected, 2, num_aliased, /*shift=*/1);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ops, ReduceKernelsTest, ::testing::ValuesIn(kAllOps),
                         [](const auto& info) { return std::string(Name(info.param)); });

template <typename T>
std::vector<T> EveryValue() {
  std::vector<T> values;
  for (int bits = 0; bits < 1 << 16; ++bits) values.push_back({static_cast<uint16_t>(bits)});
  return values;
}

template <typename T>
class SmallFloatTest : public ::testing::Test {
 protected:
  static constexpr DType kDType = std::is_same_v<T, RefHalf> ? DType::kHalf : DType::kBFloat16;

  // Verifies the reduction of all elements together, and of each alone.
  static void VerifyAll(const Reduction& reduction, const std::vector<std::vector<T>>& inputs) {
    const size_t count = inputs[0].size();
    std::vector<T> expected(count);
    std::vector<const void*> srcs;
    for (size_t i = 0; i < count; ++i) {
      std::vector<T> values;
      for (const auto& input : inputs) values.push_back(input[i]);
      expected[i] = Reference<T>(reduction, values);
    }
    for (VectorUnit unit : VectorUnits()) {
      Verify<T>(reduction, unit, inputs, expected, 1, 0, 0);
      const ReduceFn reduce = Resolve(reduction, unit);
      for (size_t i = 0; i < count; ++i) {
        T actual;
        void* const dst = &actual;
        srcs.clear();
        for (const auto& input : inputs) srcs.push_back(&input[i]);
        reduce(&dst, 1, srcs.data(), static_cast<int>(srcs.size()), 1);
        ASSERT_TRUE(Same<T>(actual, expected[i], reduction.op))
            << Describe(reduction, unit) << " of " << Print(inputs[0][i]) << " is " << Print(actual)
            << " instead of " << Print(expected[i]);
      }
    }
  }
};

using SmallFloats = ::testing::Types<RefHalf, RefBFloat16>;
TYPED_TEST_SUITE(SmallFloatTest, SmallFloats);

TYPED_TEST(SmallFloatTest, ReferenceGoesThereAndBack) {
  for (TypeParam value : EveryValue<TypeParam>()) {
    const TypeParam back = TypeParam::Nearest(value.Value());
    ASSERT_TRUE(back.bits == value.bits || std::isnan(value.Value())) << Print(value);
  }
}

TYPED_TEST(SmallFloatTest, EveryValueComesBack) {
  this->VerifyAll({this->kDType, ReduceOp::kSum}, {EveryValue<TypeParam>()});
}

// Every value plus parts of its last place: below, on, and above each tie between neighbours.
TYPED_TEST(SmallFloatTest, TiesGoToTheEven) {
  const std::vector<TypeParam> values = EveryValue<TypeParam>();
  for (float part : {0.25f, 0.5f, 0.75f, 1.5f, -0.5f}) {
    std::vector<TypeParam> parts;
    for (TypeParam value : values) {
      const float magnitude = std::isfinite(value.Value()) ? std::fabs(value.Value()) : 1;
      parts.push_back(TypeParam::Nearest(part * TypeParam::Unit(magnitude)));
    }
    this->VerifyAll({this->kDType, ReduceOp::kSum}, {values, parts});
  }
}

// Floats of all kinds: with a long mantissa, denormal in the small type, and beyond its largest.
TYPED_TEST(SmallFloatTest, EveryQuotientIsRounded) {
  for (double factor : {1.001, 3.0, 1 + 0x1p-8, 1 + 0x1p-11, 0x1.8p1, 0x1p9, 0x1.3p14, 0x1p25, 1.9,
                        0x1p-10, 1e-30}) {
    this->VerifyAll({this->kDType, ReduceOp::kAvg, factor}, {EveryValue<TypeParam>()});
  }
}

// 256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in half.
TYPED_TEST(SmallFloatTest, RoundsOnceAfterAllSources) {
  const float big = std::is_same_v<TypeParam, RefHalf> ? 2048 : 256;
  std::vector<TypeParam> inputs = {TypeParam::Nearest(big)};
  for (int i = 0; i < 8; ++i) inputs.push_back(TypeParam::Nearest(1));
  std::vector<const void*> srcs;
  for (const TypeParam& input : inputs) srcs.push_back(&input);
  TypeParam sum;
  void* const dst = &sum;
  Reduce({this->kDType, ReduceOp::kSum}, &dst, 1, srcs.data(), 9, 1);
  EXPECT_EQ(sum.Value(), big + 8);
}

TEST(ReduceTest, SumsInTheOrderOfSources) {
  const float a = 1e8f, b = -1e8f, c = 1;
  float sum;
  void* const dst = &sum;
  const void* first[] = {&a, &b, &c};
  Reduce({DType::kFloat, ReduceOp::kSum}, &dst, 1, first, 3, 1);
  EXPECT_EQ(sum, 1);
  const void* last[] = {&c, &a, &b};
  Reduce({DType::kFloat, ReduceOp::kSum}, &dst, 1, last, 3, 1);
  EXPECT_EQ(sum, 0);
}

TEST(ReduceTest, AverageOfIntegersTruncates) {
  const int8_t a[] = {-5, 5, 127, -128}, b[] = {-2, 2, 0, 0};
  int8_t average[4];
  void* const dst = average;
  const void* srcs[] = {a, b};
  Reduce({DType::kInt8, ReduceOp::kAvg, 2}, &dst, 1, srcs, 2, 4);
  EXPECT_THAT(average, ::testing::ElementsAre(-3, 3, 63, -64));
  Reduce({DType::kInt8, ReduceOp::kAvg, 128}, &dst, 1, srcs, 2, 4);
  EXPECT_THAT(average, ::testing::ElementsAre(0, 0, 0, -1));
}

TEST(CheckTest, SaysWhyNot) {
  EXPECT_TRUE(Check({}).ok());
  EXPECT_TRUE(Check({DType::kBool, ReduceOp::kBxor}).ok());
  EXPECT_TRUE(Check({DType::kComplexFloat, ReduceOp::kAvg, 3}).ok());
  const auto message = [](const Reduction& reduction) {
    return std::string(Check(reduction).message());
  };
  EXPECT_EQ(message({DType::kComplexFloat, ReduceOp::kMin}),
            "MIN of complex64: complex numbers have no order");
  EXPECT_THAT(message({DType::kBool, ReduceOp::kAvg}), HasSubstr("use SUM"));
  EXPECT_THAT(message({DType::kBFloat16, ReduceOp::kBand}), HasSubstr("integers and bools"));
  EXPECT_THAT(message({DType::kInt32, ReduceOp::kAvg, 2.5}), HasSubstr("whole number"));
  EXPECT_THAT(message({DType::kInt32, ReduceOp::kAvg, 0}), HasSubstr("positive"));
  EXPECT_THAT(message({DType::kFloat, ReduceOp::kAvg, -1}), HasSubstr("positive"));
}

TEST(DTypeTest, SizesAndNames) {
  ForEachDType([]<typename T>(DType dtype) { EXPECT_EQ(ElementSize(dtype), sizeof(T)); });
  EXPECT_EQ(Name(DType::kBool), "bool");
  EXPECT_EQ(Name(DType::kHalf), "float16");
  EXPECT_EQ(Name(DType::kComplexDouble), "complex128");
  EXPECT_EQ(Name(ReduceOp::kSum), "SUM");
  EXPECT_EQ(Name(ReduceOp::kBxor), "BXOR");
}

TEST(VectorUnitsTest, BaselineIsAlwaysThere) {
  ASSERT_FALSE(VectorUnits().empty());
  EXPECT_EQ(VectorUnits().front(), VectorUnit::kBaseline);
}

}  // namespace
}  // namespace ddp::backends
