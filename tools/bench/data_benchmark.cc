// Times the data loading of one rank: the order of an epoch, and a batch.
//
//   bazel run //tools/bench:data_benchmark

#include <vector>

#include "absl/log/absl_check.h"
#include "benchmark/benchmark.h"
#include "ddp/data/sampler.h"
#include "tools/datasets/registry.h"

namespace ddp {
namespace {

// The order of an epoch of `n` examples, and one of two ranks' share of it.
void BM_DistributedSampler(benchmark::State& state) {
  const int64_t n = state.range(0);
  auto sampler = data::DistributedSampler::Create(n, {.num_replicas = 2});
  ABSL_CHECK_OK(sampler.status());
  for (auto _ : state) benchmark::DoNotOptimize(sampler->Indices());
  state.SetItemsProcessed(state.iterations() * n);
}
BENCHMARK(BM_DistributedSampler)->Arg(60000)->Arg(1000000);

// A batch of normalised images, gathered in random order.
void BM_FashionMnistBatch(benchmark::State& state) {
  auto load = tools::datasets::DatasetRegistry::Find("fashion_mnist");
  ABSL_CHECK_OK(load.status());
  auto splits = (*load)({});
  ABSL_CHECK_OK(splits.status());
  auto sampler = data::DistributedSampler::Create(splits->train->size(), {});
  ABSL_CHECK_OK(sampler.status());
  const std::vector<int64_t> order = sampler->Indices();
  const size_t batch = static_cast<size_t>(state.range(0));
  size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(splits->train->Get(absl::MakeConstSpan(order).subspan(at, batch)));
    at = at + 2 * batch <= order.size() ? at + batch : 0;
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(batch));
}
BENCHMARK(BM_FashionMnistBatch)->Arg(64)->Arg(1024);

}  // namespace
}  // namespace ddp
