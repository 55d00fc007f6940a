// GB/s of the sums that an all-reduce makes, bytes read and written, for every vector unit of this
// processor. Each result is checked before it is timed.
//
//   bazel run //backends/common:reduce_kernels_benchmark -- --benchmark_filter=bfloat16
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends/common/reduce_kernels.h"
#include "benchmark/benchmark.h"

namespace ddp::backends {
namespace {

struct Case {
  DType dtype;
  VectorUnit unit;
  int num_srcs;
  int num_dsts;
  size_t bytes;
};

// 2 in the type of `dtype`.
std::vector<unsigned char> Two(DType dtype) {
  const float as_float = 2;
  const uint16_t as_half = 0x4000;
  std::vector<unsigned char> bytes(ElementSize(dtype));
  if (dtype == DType::kFloat) {
    std::memcpy(bytes.data(), &as_float, sizeof(as_float));
  } else {
    std::memcpy(bytes.data(), &as_half, sizeof(as_half));  // The same bits in half and bfloat16.
  }
  return bytes;
}

void BM_Sum(benchmark::State& state, const Case& c) {
  // All zero but for the last source. Rounds in place double the sum up to infinity, which costs
  // what any other sum does.
  constexpr size_t kPage = 4096;
  std::vector<std::unique_ptr<char, decltype(&std::free)>> owners;
  std::vector<void*> dsts;
  std::vector<const void*> srcs;
  for (int s = 0; s < c.num_srcs + (c.num_dsts > 1 ? 0 : 1); ++s) {
    const size_t size = (c.bytes + 2 * kPage - 1) / kPage * kPage;
    owners.emplace_back(static_cast<char*>(std::aligned_alloc(kPage, size)), &std::free);
    std::memset(owners.back().get(), 0, size);
    if (s < c.num_srcs) srcs.push_back(owners.back().get());
  }
  // One destination stands alone; several are the sources themselves, as when each rank's copy is
  // overwritten.
  for (int d = 0; d < c.num_dsts; ++d) {
    dsts.push_back(owners[c.num_dsts > 1 ? d : c.num_srcs].get());
  }
  const std::vector<unsigned char> two = Two(c.dtype);
  char* const last = owners[c.num_srcs - 1].get();
  for (size_t at = 0; at < c.bytes; at += two.size())
    std::memcpy(last + at, two.data(), two.size());
  const ReduceFn reduce = Resolve({c.dtype, ReduceOp::kSum}, c.unit);
  const size_t count = c.bytes / ElementSize(c.dtype);

  reduce(dsts.data(), c.num_dsts, srcs.data(), c.num_srcs, count);
  for (void* dst : dsts) {
    for (size_t at = 0; at < c.bytes; at += two.size()) {
      if (std::memcmp(static_cast<char*>(dst) + at, two.data(), two.size()) != 0) {
        state.SkipWithError(absl::StrCat("wrong sum at byte ", at).c_str());
        return;
      }
    }
  }
  for (auto _ : state) {
    reduce(dsts.data(), c.num_dsts, srcs.data(), c.num_srcs, count);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * c.bytes * (c.num_srcs + c.num_dsts));
  state.SetItemsProcessed(state.iterations() * count);
}

absl::string_view Name(VectorUnit unit) {
  switch (unit) {
    case VectorUnit::kBaseline:
      return "baseline";
    case VectorUnit::kAvx2:
      return "avx2";
    case VectorUnit::kAvx512:
      return "avx512";
  }
  return "";
}

const bool registered = [] {
  struct Shape {
    int num_srcs;
    int num_dsts;
  };
  for (DType dtype : {DType::kFloat, DType::kBFloat16, DType::kHalf}) {
    for (VectorUnit unit : VectorUnits()) {
      for (Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{4, 4}, Shape{8, 1}}) {
        for (size_t bytes : {size_t{8}, size_t{4} << 10, size_t{256} << 10, size_t{16} << 20}) {
          const Case c{dtype, unit, shape.num_srcs, shape.num_dsts, bytes};
          benchmark::RegisterBenchmark(
              absl::StrCat(Name(dtype), "/", Name(unit), "/", shape.num_srcs, "_to_",
                           shape.num_dsts, "/", bytes)
                  .c_str(),
              [c](benchmark::State& state) { BM_Sum(state, c); });
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace ddp::backends
