#include "ddp/data/sampler.h"

#include <algorithm>
#include <numeric>
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

Share ShareOf(std::vector<int64_t> indices) {
  const auto size = static_cast<int64_t>(indices.size());
  return {
      .size = size, .order = Listed(std::move(indices)), .positions = std::max<int64_t>(1, size)};
}

int64_t Share::Fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  };
  add(positions);
  for (int64_t p = 0; p < std::min<int64_t>(positions, 64); ++p) add(order(p));
  return static_cast<int64_t>(hash | 1);
}

absl::StatusOr<DistributedSampler> DistributedSampler::Create(
    int64_t dataset_size, const DistributedSamplerOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(dataset_size, options.num_replicas, options.rank));
  DDP_ASSIGN_OR_RETURN(SharedSampler sampler, options.shuffle
                                                  ? RandomSampler(dataset_size, options.seed)
                                                  : SequentialSampler(dataset_size));
  return DistributedSampler(std::move(sampler), options);
}

absl::StatusOr<DistributedSampler> DistributedSampler::Create(
    SharedSampler sampler, const DistributedSamplerOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(sampler->size(), options.num_replicas, options.rank));
  return DistributedSampler(std::move(sampler), options);
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

Share DistributedSampler::ShareFrom(int64_t start) const {
  return {.size = num_samples(start),
          .first = start + options_.rank,
          .stride = options_.num_replicas,
          .order = sampler_->OrderOf(epoch_),
          .positions = dataset_size_,
          .seed = options_.seed,
          .epoch = epoch_};
}

std::vector<int64_t> DistributedSampler::Indices(int64_t start) const {
  const Share share = ShareFrom(start);
  std::vector<int64_t> indices(share.size);
  for (int64_t i = 0; i < share.size; ++i) indices[i] = share.Index(i);
  return indices;
}

absl::StatusOr<EvaluationSampler> EvaluationSampler::Create(
    int64_t dataset_size, const EvaluationSamplerOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(dataset_size, options.num_replicas, options.rank));
  const int64_t share = dataset_size / options.num_replicas;
  const int64_t longer = dataset_size % options.num_replicas;  // ranks with one more than `share`
  const int64_t begin = options.rank * share + std::min<int64_t>(options.rank, longer);
  return EvaluationSampler(begin, begin + share + (options.rank < longer), dataset_size,
                           options.seed);
}

Share EvaluationSampler::AsShare() const {
  return {.size = num_samples(),
          .first = begin_,
          .order = [](int64_t position) { return position; },
          .positions = positions_,
          .seed = seed_};
}

std::vector<int64_t> EvaluationSampler::Indices() const {
  std::vector<int64_t> indices(num_samples());
  std::iota(indices.begin(), indices.end(), begin_);
  return indices;
}

}  // namespace ddp::data
