// Which examples of a dataset are this rank's, and in which order. No tensors: indices only.
//
//   DDP_ASSIGN_OR_RETURN(DistributedSampler sampler,
//                        DistributedSampler::Create(train.size(), {.num_replicas = world_size,
//                                                                  .rank = rank}));
//   sampler.set_epoch(epoch);
//   std::vector<int64_t> indices = sampler.Indices();  // for a Loader
//
// Nothing here is collective: each rank computes its share of the same global order on its own.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::data {

struct DistributedSamplerOptions {
  int num_replicas = 1;    // world size, >= 1
  int rank = 0;            // in [0, num_replicas)
  bool shuffle = true;     // false: the dataset's own order
  int64_t seed = 0;        // the same on all ranks
  bool drop_last = false;  // true: drop the uneven tail instead of padding
};

// For training: every rank gets equally many examples. It is torch.utils.data.DistributedSampler,
// index for index: rank r takes positions r, r + R, r + 2R, … of the epoch's order, which is a
// function of (seed, epoch) alone. Where the dataset's size n is no multiple of R, the order is
// padded with its own beginning (repeatedly, if n < R), or with drop_last cut to a multiple of R
// (to nothing, if n < R).
//
// An epoch can be gone on with in its middle, at any world size: of the epoch's order, the examples
// before `start` are left out, and those from it on are dealt as above. With the world size and a
// `start` that R divides, that is the rest of what every rank had; with another world size too
// every remaining example is dealt once, and padding is at the end alone.
//
// A value; thread-compatible.
class DistributedSampler {
 public:
  // InvalidArgument, naming the option, for an empty dataset or a rank outside the world.
  static absl::StatusOr<DistributedSampler> Create(int64_t dataset_size,
                                                   const DistributedSamplerOptions& options);

  // To be called before each epoch's Indices(), with the same number on all ranks; otherwise every
  // epoch has the order of epoch 0.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  // Number of examples per rank from position `start` of the epoch's order, >= 0, to its end; the
  // same on all ranks. None from dataset_size on.
  int64_t num_samples(int64_t start = 0) const;

  // num_samples() times the number of ranks: padding included, dropped examples not.
  int64_t total_size() const { return num_samples() * options_.num_replicas; }

  // This rank's num_samples(start) indices for the current epoch.
  std::vector<int64_t> Indices(int64_t start = 0) const;

 private:
  DistributedSampler(int64_t dataset_size, const DistributedSamplerOptions& options)
      : options_(options), dataset_size_(dataset_size) {}

  DistributedSamplerOptions options_;
  int64_t dataset_size_;
  int64_t epoch_ = 0;
};

struct EvaluationSamplerOptions {
  int num_replicas = 1;  // world size, >= 1
  int rank = 0;          // in [0, num_replicas)
};

// For evaluation: every example goes to exactly one rank, none twice, so that sums over ranks are
// sums over the dataset. Rank r has the r-th of R contiguous blocks whose sizes differ by at most
// one, the longer ones first: results gathered in rank order are in the dataset's order. Ranks may
// differ in their number of batches and may have none, so the evaluated module must not make
// collective calls.
//
// A value; immutable.
class EvaluationSampler {
 public:
  // InvalidArgument, naming the option, for an empty dataset or a rank outside the world.
  static absl::StatusOr<EvaluationSampler> Create(int64_t dataset_size,
                                                  const EvaluationSamplerOptions& options);

  // Number of examples of this rank.
  int64_t num_samples() const { return end_ - begin_; }

  // This rank's indices: begin, begin + 1, …
  std::vector<int64_t> Indices() const;

 private:
  EvaluationSampler(int64_t begin, int64_t end) : begin_(begin), end_(end) {}

  int64_t begin_;
  int64_t end_;
};

}  // namespace ddp::data
