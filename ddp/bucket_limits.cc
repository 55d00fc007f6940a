#include "ddp/bucket_limits.h"

#include <algorithm>
#include <limits>

namespace ddp {
namespace {

constexpr double kDefaultBucketMb = 25;

}  // namespace

BucketLimits ChooseBucketLimits(const DataParallelOptions& options,
                                bool collectives_interrupt_backward) {
  const bool is_explicit = options.bucket_cap_mb.has_value();
  BucketLimits limits;
  limits.others =
      static_cast<int64_t>(options.bucket_cap_mb.value_or(kDefaultBucketMb) * 1024 * 1024);
  // A smaller first bucket starts its all-reduce early. If that only interrupts backward, all
  // buckets have the same size.
  const int64_t small = std::min(limits.others, kFirstBucketBytes);
  limits.first = is_explicit || collectives_interrupt_backward ? limits.others : small;
  // Buckets are rebuilt after the first iteration, in the order in which gradients arrived; until
  // then one is enough. With find_unused_parameters the first layout stays.
  if (options.find_unused_parameters && !options.static_graph) {
    limits.initial = {static_cast<size_t>(is_explicit ? limits.others : small),
                      static_cast<size_t>(limits.others)};
  } else {
    limits.initial = {std::numeric_limits<size_t>::max()};
  }
  return limits;
}

}  // namespace ddp
