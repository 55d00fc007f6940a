// Bytes per second of Crc32, beside zlib's crc32 and a copy of the same bytes, in and out of cache.
//
//   ./bazelw run //checkpoint:crc32_benchmark
#include <benchmark/benchmark.h>
#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "checkpoint/crc32.h"

namespace ddp::checkpoint {
namespace {

constexpr int64_t kInCache = int64_t{256} << 10;
constexpr int64_t kInMemory = int64_t{256} << 20;

void BM_Crc32(benchmark::State& state) {
  const std::vector<uint8_t> bytes(static_cast<size_t>(state.range(0)), 1);
  for (auto _ : state) benchmark::DoNotOptimize(Crc32(bytes.data(), bytes.size()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Crc32)->Arg(kInCache)->Arg(kInMemory);

void BM_Zlib(benchmark::State& state) {
  const std::vector<uint8_t> bytes(static_cast<size_t>(state.range(0)), 1);
  for (auto _ : state) benchmark::DoNotOptimize(crc32_z(0, bytes.data(), bytes.size()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Zlib)->Arg(kInCache)->Arg(kInMemory);

void BM_Copy(benchmark::State& state) {
  const std::vector<uint8_t> bytes(static_cast<size_t>(state.range(0)), 1);
  std::vector<uint8_t> copy(bytes.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Copy)->Arg(kInCache)->Arg(kInMemory);

}  // namespace
}  // namespace ddp::checkpoint
