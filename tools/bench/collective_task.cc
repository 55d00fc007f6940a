#include "tools/bench/collective_task.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace ddp::tools::bench {
namespace {

constexpr int64_t kPeriod = 8191;  // a prime

const std::map<absl::string_view, CollectiveOp>& Ops() {
  static const auto* ops = new std::map<absl::string_view, CollectiveOp>{
      {"allreduce", CollectiveOp::kAllReduce},
      {"reduce_scatter", CollectiveOp::kReduceScatter},
      {"allgather", CollectiveOp::kAllGather},
      {"broadcast", CollectiveOp::kBroadcast}};
  return *ops;
}

const std::map<absl::string_view, Dtype>& Dtypes() {
  static const auto* dtypes = new std::map<absl::string_view, Dtype>{
      {"float32", Dtype::kFloat32},   {"float64", Dtype::kFloat64}, {"float16", Dtype::kFloat16},
      {"bfloat16", Dtype::kBFloat16}, {"int32", Dtype::kInt32},     {"int64", Dtype::kInt64}};
  return *dtypes;
}

const std::map<absl::string_view, CollectiveTask::Do>& Doings() {
  static const auto* doings =
      new std::map<absl::string_view, CollectiveTask::Do>{{"time", CollectiveTask::Do::kTime},
                                                          {"verify", CollectiveTask::Do::kVerify},
                                                          {"free", CollectiveTask::Do::kFree}};
  return *doings;
}

template <typename T>
bool Look(const std::map<absl::string_view, T>& names, absl::string_view name, T& value) {
  auto it = names.find(name);
  if (it == names.end()) return false;
  value = it->second;
  return true;
}

bool ReadWord(absl::string_view name, absl::string_view value, CollectiveTask& task) {
  if (name == "do") return Look(Doings(), value, task.what);
  if (name == "op") return Look(Ops(), value, task.op);
  if (name == "dtype") return Look(Dtypes(), value, task.dtype);
  if (name == "bytes") return absl::SimpleAtoi(value, &task.bytes) && task.bytes > 0;
  if (name == "iterations") return absl::SimpleAtoi(value, &task.iterations) && task.iterations > 0;
  if (name == "seed") return absl::SimpleAtoi(value, &task.seed);
  if (name == "expected_seed") return absl::SimpleAtoi(value, &task.expected_seed);
  if (name == "arena") return absl::SimpleAtob(value, &task.arena);
  if (name == "through") {
    task.through = std::string(value);
    return true;
  }
  if (name == "variant") {
    task.variant = std::string(value);
    return true;
  }
  return false;
}

template <typename T>
void Append(T value, std::vector<char>& bytes) {
  const char* raw = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), raw, raw + sizeof(value));
}

// Whole numbers below 256 are exact in eight bits of mantissa: the upper half of a float.
uint16_t ToBFloat16(uint8_t value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16);
}

// IEEE 754 binary16: five bits of exponent, biased by 15, and ten of mantissa.
uint16_t ToFloat16(uint8_t value) {
  if (value == 0) return 0;
  const int exponent = std::bit_width(value) - 1;
  return static_cast<uint16_t>((exponent + 15) << 10 | ((value << (10 - exponent)) & 0x3ff));
}

void Encode(Dtype dtype, uint8_t value, std::vector<char>& bytes) {
  switch (dtype) {
    case Dtype::kFloat32:
      return Append(static_cast<float>(value), bytes);
    case Dtype::kFloat64:
      return Append(static_cast<double>(value), bytes);
    case Dtype::kFloat16:
      return Append(ToFloat16(value), bytes);
    case Dtype::kBFloat16:
      return Append(ToBFloat16(value), bytes);
    case Dtype::kInt32:
      return Append(static_cast<int32_t>(value), bytes);
    case Dtype::kInt64:
      return Append(static_cast<int64_t>(value), bytes);
  }
}

// SplitMix64's output function (Steele, Lea and Flood, 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::vector<uint8_t> Values(int rank, int world_size, uint64_t seed) {
  // Sums over all ranks stay below 256.
  const uint64_t bound = std::clamp(255 / world_size + 1, 2, 13);
  std::vector<uint8_t> values(kPeriod);
  for (int64_t i = 0; i < kPeriod; ++i) {
    values[i] = static_cast<uint8_t>(
        Mix(Mix(seed * 1000003 + static_cast<uint64_t>(rank)) + static_cast<uint64_t>(i)) % bound);
  }
  return values;
}

Pattern Sum(const CollectiveTask& task, int world_size) {
  std::vector<uint8_t> sum(kPeriod, 0);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<uint8_t> values = Values(rank, world_size, task.expected_seed);
    for (int64_t i = 0; i < kPeriod; ++i) sum[i] = static_cast<uint8_t>(sum[i] + values[i]);
  }
  return Pattern(task.dtype, std::move(sum));
}

// Calls f(offset of the next piece in bytes, where the piece begins in the period, its length) for
// the pieces of n elements that begin at `first` of the pattern.
template <typename F>
bool ForEachPiece(int64_t n, int64_t first, F&& f) {
  for (int64_t done = 0; done < n;) {
    const int64_t from = (first + done) % kPeriod;
    const int64_t length = std::min(kPeriod - from, n - done);
    if (!f(done, from, length)) return false;
    done += length;
  }
  return true;
}

}  // namespace

int64_t ElementSize(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
      return 2;
    case Dtype::kFloat32:
    case Dtype::kInt32:
      return 4;
    case Dtype::kFloat64:
    case Dtype::kInt64:
      return 8;
  }
  return 0;
}

absl::StatusOr<CollectiveTask> ParseTask(absl::string_view line) {
  CollectiveTask task;
  for (absl::string_view word : absl::StrSplit(line, absl::ByAnyChar(" \n"), absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (!ReadWord(pair.first, pair.second, task)) {
      return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no part of a task"));
    }
  }
  return task;
}

absl::StatusOr<int64_t> Elements(const CollectiveTask& task, int world_size) {
  const bool shares =
      task.op == CollectiveOp::kReduceScatter || task.op == CollectiveOp::kAllGather;
  const int64_t unit = ElementSize(task.dtype) * (shares ? world_size : 1);
  if (task.bytes % unit != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(task.bytes, " bytes are not a multiple of the ", unit, " that this takes"));
  }
  return task.bytes / ElementSize(task.dtype);
}

int64_t InputElements(const CollectiveTask& task, int world_size) {
  const int64_t all = task.bytes / ElementSize(task.dtype);
  return task.op == CollectiveOp::kAllGather ? all / world_size : all;
}

int64_t OutputElements(const CollectiveTask& task, int world_size) {
  const int64_t all = task.bytes / ElementSize(task.dtype);
  return task.op == CollectiveOp::kReduceScatter ? all / world_size : all;
}

Pattern::Pattern(Dtype dtype, std::vector<uint8_t> period) : element_size_(ElementSize(dtype)) {
  for (uint8_t value : period) Encode(dtype, value, period_);
}

void Pattern::Fill(void* destination, int64_t n, int64_t first) const {
  ForEachPiece(n, first, [&](int64_t done, int64_t from, int64_t length) {
    std::memcpy(static_cast<char*>(destination) + done * element_size_,
                period_.data() + from * element_size_, static_cast<size_t>(length * element_size_));
    return true;
  });
}

std::optional<int64_t> Pattern::Mismatch(const void* source, int64_t n, int64_t first) const {
  std::optional<int64_t> found;
  ForEachPiece(n, first, [&](int64_t done, int64_t from, int64_t length) {
    const char* have = static_cast<const char*>(source) + done * element_size_;
    const char* want = period_.data() + from * element_size_;
    const auto bytes = static_cast<size_t>(length * element_size_);
    if (std::memcmp(have, want, bytes) == 0) return true;
    found = done + (std::mismatch(have, have + bytes, want).first - have) / element_size_;
    return false;
  });
  return found;
}

Pattern Input(const CollectiveTask& task, const Place& place, uint64_t seed) {
  return Pattern(task.dtype, Values(place.rank, place.world_size, seed));
}

absl::Status CheckOutput(const CollectiveTask& task, const Place& place, const void* output) {
  const int64_t n = OutputElements(task, place.world_size);
  std::optional<int64_t> wrong;
  switch (task.op) {
    case CollectiveOp::kAllReduce:
      wrong = Sum(task, place.world_size).Mismatch(output, n);
      break;
    case CollectiveOp::kReduceScatter:
      wrong = Sum(task, place.world_size).Mismatch(output, n, place.rank * n);
      break;
    case CollectiveOp::kBroadcast:
      wrong = Input(task, {0, place.world_size}, task.expected_seed).Mismatch(output, n);
      break;
    case CollectiveOp::kAllGather: {
      const int64_t share = n / place.world_size;
      for (int rank = 0; rank < place.world_size && !wrong; ++rank) {
        const char* part =
            static_cast<const char*>(output) + rank * share * ElementSize(task.dtype);
        wrong = Input(task, {rank, place.world_size}, task.expected_seed).Mismatch(part, share);
        if (wrong) *wrong += rank * share;
      }
      break;
    }
  }
  if (!wrong) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("wrong result: element ", *wrong, " of ", n, " on rank ",
                                          place.rank, " of ", place.world_size));
}

}  // namespace ddp::tools::bench
