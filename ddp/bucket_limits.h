// Sizes of gradient buckets. No torch. Private to data_parallel.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/options.h"

namespace ddp {

// Bytes. A bucket is full once it has at least as many.
struct BucketLimits {
  std::vector<size_t> initial;  // of the first layout; the last one is that of all further buckets
  int64_t first = 0;            // of the first bucket, once buckets are rebuilt
  int64_t others = 0;
};

// PyTorch's default size of the first bucket.
inline constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;

// Whether backward keeps all cores of a host busy if each of `ranks` ranks runs it on
// `threads_per_rank` threads. One core per rank beyond these is then missing.
constexpr bool BackwardUsesAllCores(int cores, int ranks, int threads_per_rank) {
  return cores < ranks * (threads_per_rank + 1);
}

// The limits that `options` ask for. `collectives_interrupt_backward`: the backend's collectives
// run on the ranks' cores, and BackwardUsesAllCores. It may differ between ranks: rank 0's rebuilt
// layout holds for all.
BucketLimits ChooseBucketLimits(const DataParallelOptions& options,
                                bool collectives_interrupt_backward);

}  // namespace ddp
