#include "backends/conformance/values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "c10/util/BFloat16.h"
#include "c10/util/Half.h"

namespace ddp::backends::conformance {
namespace {

using c10::ScalarType;

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t Stream(uint64_t salt, int rank, int input) {
  return Mix(salt * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(rank) * 64 + input + 1);
}

uint64_t Hash(uint64_t stream, int64_t position) {
  return Mix(stream + static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15);
}

template <typename T>
constexpr bool kFloating =
    std::is_floating_point_v<T> || std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// What a reduction of T is computed in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double,
                                std::conditional_t<kFloating<T>, float, int64_t>>;

// Operands are such that no reduction over eight ranks overflows, except where wrapping is defined
// (integers narrower than int) and tells wrong results apart no worse.
template <typename T>
T Operand(ReductionOp reduction, uint64_t hash) {
  if constexpr (std::is_same_v<T, bool>) {
    switch (reduction) {
      case ReductionOp::kSum:
      case ReductionOp::kMax:
      case ReductionOp::kBor:
        return hash % 8 == 0;
      case ReductionOp::kProduct:
      case ReductionOp::kMin:
      case ReductionOp::kBand:
        return hash % 8 != 0;
      default:
        return hash % 2 == 0;
    }
  } else if constexpr (kFloating<T>) {
    const float magnitude = 0.5f + static_cast<float>(hash >> 40) / (1 << 24);
    return static_cast<T>((hash & 1) != 0 ? magnitude : -magnitude);
  } else {
    const int64_t digit = static_cast<int64_t>(hash >> 8);
    switch (reduction) {
      case ReductionOp::kSum:
      case ReductionOp::kAvg:
        return static_cast<T>(std::is_unsigned_v<T> ? digit % 32 : digit % 31 - 15);
      case ReductionOp::kProduct:
        return static_cast<T>(2 * (digit % 4) + 1);
      default:
        return static_cast<T>(hash);
    }
  }
}

template <typename W>
W Combine(ReductionOp reduction, W a, W b) {
  switch (reduction) {
    case ReductionOp::kProduct:
      return a * b;
    case ReductionOp::kMin:
      return b < a ? b : a;
    case ReductionOp::kMax:
      return a < b ? b : a;
    case ReductionOp::kBand:
    case ReductionOp::kBor:
    case ReductionOp::kBxor:
      if constexpr (std::is_integral_v<W>) {
        if (reduction == ReductionOp::kBand) return a & b;
        return reduction == ReductionOp::kBor ? a | b : a ^ b;
      }
      break;
    default:
      break;
  }
  return a + b;
}

template <typename T>
void FillOperands(ReductionOp reduction, uint64_t stream, int64_t offset, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Operand<T>(reduction, Hash(stream, offset + i));
}

template <typename T>
void Reduce(ReductionOp reduction, uint64_t salt, int ranks, const Segment& segment, T* out) {
  std::vector<uint64_t> streams;
  for (int rank = 0; rank < ranks; ++rank) streams.push_back(Stream(salt, rank, segment.input));
  for (int64_t i = 0; i < segment.count; ++i) {
    const int64_t position = segment.offset + i;
    Wide<T> result = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      auto operand = static_cast<Wide<T>>(Operand<T>(reduction, Hash(streams[rank], position)));
      if (reduction == ReductionOp::kPremulSum) operand *= static_cast<Wide<T>>(PremulFactor(rank));
      result = rank == 0 ? operand : Combine(reduction, result, operand);
    }
    if (reduction == ReductionOp::kAvg) result /= static_cast<Wide<T>>(ranks);
    out[i] = static_cast<T>(result);
  }
}

template <typename T>
double Printable(T value) {
  return static_cast<double>(value);
}

template <typename T>
double Epsilon() {
  if constexpr (kFloating<T>) return static_cast<double>(std::numeric_limits<T>::epsilon());
  return 0;
}

template <typename T>
double Tolerance(const Case& c, int ranks, Exactness exactness, double expected) {
  if (!kFloating<T>) return 0;
  // x / n and x * (1 / n) are both averages.
  if (exactness == Exactness::kBits) {
    return c.reduction == ReductionOp::kAvg ? Epsilon<T>() * std::abs(expected) : 0;
  }
  // Half an epsilon of each partial result, here and there.
  switch (c.reduction) {
    case ReductionOp::kMin:
    case ReductionOp::kMax:
      return 0;
    case ReductionOp::kProduct:
      return Epsilon<T>() * ranks * std::abs(expected);
    default:
      return Epsilon<T>() * 1.5 * (ranks * (ranks + 1) / 2.0);
  }
}

// What was found of an output that is not as it must be.
struct Differences {
  int64_t count = 0;  // elements
  std::string first;  // the first of them, in words
};

// Adds what differs in `count` elements that a reduction made; the first of them is number
// `position` of the output.
template <typename T>
void CompareReduced(const Case& c, int ranks, Exactness exactness, const uint8_t* expected,
                    const uint8_t* actual, int64_t count, int64_t position, Differences& found) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::memcmp(expected + i * sizeof(T), actual + i * sizeof(T), sizeof(T)) == 0) continue;
    // A bool that is neither 0 nor 1 must not be read as one.
    using Shown = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;
    Shown e, a;
    std::memcpy(&e, expected + i * sizeof(T), sizeof(T));
    std::memcpy(&a, actual + i * sizeof(T), sizeof(T));
    if constexpr (kFloating<T>) {
      const double difference = std::abs(Printable(e) - Printable(a));
      if (difference <= Tolerance<T>(c, ranks, exactness, Printable(e))) continue;
    }
    if (found.count++ == 0) {
      found.first =
          absl::StrCat("element ", position + i, " is ", Printable(a), ", not ", Printable(e));
    }
  }
}

// Adds what differs in `count` elements of `width` bytes that were only moved.
void CompareMoved(size_t width, const uint8_t* expected, const uint8_t* actual, int64_t count,
                  int64_t position, Differences& found) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::memcmp(expected + i * width, actual + i * width, width) == 0) continue;
    if (found.count++ == 0) {
      found.first = absl::StrCat("element ", position + i, " is not what was sent");
    }
  }
}

// Calls `f` with a value of the C++ type of `dtype`, of those that are reduced.
template <typename F>
auto VisitReduced(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Half:
      return f(c10::Half{});
    case ScalarType::BFloat16:
      return f(c10::BFloat16{});
    case ScalarType::Byte:
      return f(uint8_t{});
    case ScalarType::Char:
      return f(int8_t{});
    case ScalarType::Short:
      return f(int16_t{});
    case ScalarType::Int:
      return f(int32_t{});
    case ScalarType::Long:
      return f(int64_t{});
    case ScalarType::Bool:
      return f(bool{});
    default:
      ABSL_CHECK(dtype == ScalarType::Float) << DtypeName(dtype) << " is not reduced";
      return f(float{});
  }
}

}  // namespace

std::vector<uint8_t> Values::Input(int rank, int input, int64_t offset, int64_t count) const {
  const size_t width = c10::elementSize(case_.dtype);
  const uint64_t stream = Stream(salt_, rank, input);
  std::vector<uint8_t> bytes(count * width);
  if (HasReduction(case_.op)) {
    VisitReduced(case_.dtype, [&](auto zero) {
      using T = decltype(zero);
      FillOperands(case_.reduction, stream, offset, count, reinterpret_cast<T*>(bytes.data()));
    });
    return bytes;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint64_t hash[2] = {Hash(stream, offset + i), 0};
    if (case_.dtype == ScalarType::Bool) hash[0] &= 1;
    hash[1] = ~hash[0];  // the wider dtypes'
    std::memcpy(&bytes[i * width], hash, width);
  }
  return bytes;
}

std::vector<uint8_t> Values::Expected(const std::vector<Segment>& output) const {
  const size_t width = c10::elementSize(case_.dtype);
  std::vector<uint8_t> bytes(TotalCount(output) * width);
  uint8_t* next = bytes.data();
  for (const Segment& segment : output) {
    if (segment.count == 0) continue;
    if (segment.rank == Segment::kAllRanks) {
      VisitReduced(case_.dtype, [&](auto zero) {
        using T = decltype(zero);
        Reduce(case_.reduction, salt_, group_size_, segment, reinterpret_cast<T*>(next));
      });
    } else {
      const auto input = Input(segment.rank, segment.input, segment.offset, segment.count);
      std::memcpy(next, input.data(), input.size());
    }
    next += segment.count * width;
  }
  return bytes;
}

absl::Status Values::Compare(const std::vector<Segment>& output, absl::Span<const uint8_t> actual,
                             Exactness exactness) const {
  const size_t width = c10::elementSize(case_.dtype);
  const int64_t total = TotalCount(output);
  if (actual.size() != total * width) {
    return absl::DataLossError(
        absl::StrCat(actual.size(), " bytes where ", total * width, " are expected"));
  }
  Differences found;
  int64_t position = 0;
  for (const Segment& segment : output) {
    for (int64_t done = 0; done < segment.count; done += kBlock) {
      const int64_t count = std::min(kBlock, segment.count - done);
      const std::vector<uint8_t> expected =
          Expected({{segment.rank, segment.input, segment.offset + done, count}});
      const uint8_t* part = actual.data() + (position + done) * width;
      if (std::memcmp(expected.data(), part, expected.size()) == 0) continue;
      if (segment.rank == Segment::kAllRanks) {
        VisitReduced(case_.dtype, [&](auto zero) {
          CompareReduced<decltype(zero)>(case_, group_size_, exactness, expected.data(), part,
                                         count, position + done, found);
        });
      } else {
        CompareMoved(width, expected.data(), part, count, position + done, found);
      }
    }
    position += segment.count;
  }
  if (found.count == 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(found.first, "; ", found.count, " of ", total, " elements differ"));
}

}  // namespace ddp::backends::conformance
