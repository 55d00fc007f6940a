#include "ddp/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::data {
namespace {

absl::Status Validate(int64_t dataset_size, int num_replicas, int rank) {
  if (dataset_size <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot sample from a dataset of ", dataset_size, " examples"));
  }
  if (num_replicas < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampler option num_replicas is ", num_replicas, "; it must be at least 1"));
  }
  if (rank < 0 || rank >= num_replicas) {
    return absl::InvalidArgumentError(absl::StrCat("sampler option rank is ", rank,
                                                   "; with num_replicas ", num_replicas,
                                                   " it must be in [0, ", num_replicas - 1, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DistributedSampler> DistributedSampler::Create(
    int64_t dataset_size, const DistributedSamplerOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(dataset_size, options.num_replicas, options.rank));
  return DistributedSampler(dataset_size, options);
}

int64_t DistributedSampler::num_samples(int64_t start) const {
  return num_samples_of(options_.rank, start);
}

int64_t DistributedSampler::num_samples_of(int rank, int64_t start) const {
  if (options_.drop_last || options_.pad) return max_num_samples(start);
  const int64_t left = std::max<int64_t>(0, dataset_size_ - start);
  return left / options_.num_replicas + (rank < left % options_.num_replicas);
}

int64_t DistributedSampler::max_num_samples(int64_t start) const {
  const int64_t left = std::max<int64_t>(0, dataset_size_ - start);
  const int64_t replicas = options_.num_replicas;
  return left / replicas + (!options_.drop_last && left % replicas != 0);
}

int64_t DistributedSampler::total_size() const {
  if (!options_.drop_last && !options_.pad) return dataset_size_;
  return max_num_samples() * options_.num_replicas;
}

std::vector<int64_t> DistributedSampler::Indices(int64_t start) const {
  // Unsigned: the sum wraps around instead of being undefined.
  const uint64_t seed = static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(epoch_);
  std::vector<int64_t> order;
  if (options_.shuffle) order = RandomPermutation(dataset_size_, seed);

  std::vector<int64_t> indices(num_samples(start));
  for (int64_t i = 0; i < static_cast<int64_t>(indices.size()); ++i) {
    const int64_t position = (start + options_.rank + i * options_.num_replicas) % dataset_size_;
    indices[i] = options_.shuffle ? order[position] : position;
  }
  return indices;
}

absl::StatusOr<EvaluationSampler> EvaluationSampler::Create(
    int64_t dataset_size, const EvaluationSamplerOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(dataset_size, options.num_replicas, options.rank));
  const int64_t share = dataset_size / options.num_replicas;
  const int64_t longer = dataset_size % options.num_replicas;  // ranks with one more than `share`
  const int64_t begin = options.rank * share + std::min<int64_t>(options.rank, longer);
  return EvaluationSampler(begin, begin + share + (options.rank < longer));
}

std::vector<int64_t> EvaluationSampler::Indices() const {
  std::vector<int64_t> indices(num_samples());
  std::iota(indices.begin(), indices.end(), begin_);
  return indices;
}

namespace internal {

// Fisher-Yates from the front; draw i picks one of the n-i that are left.
std::vector<int64_t> ShortPermutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::mt19937 generator(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < n - 1; ++i) {
    const int64_t z = static_cast<int64_t>(generator()) % (n - i);
    std::swap(order[i], order[i + z]);
  }
  return order;
}

// Fisher-Yates from the inside out; a draw is two outputs, the high half first.
std::vector<int64_t> LongPermutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(n);
  std::mt19937 generator(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t high = generator();
    const uint64_t low = generator();
    const uint64_t z = (high << 32 | low) % static_cast<uint64_t>(i + 1);
    order[i] = order[z];
    order[z] = i;
  }
  return order;
}

}  // namespace internal

std::vector<int64_t> RandomPermutation(int64_t n, uint64_t seed) {
  return n < internal::kLongPermutation ? internal::ShortPermutation(n, seed)
                                        : internal::LongPermutation(n, seed);
}

}  // namespace ddp::data
