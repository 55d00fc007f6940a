// Distributes the examples of a dataset over the ranks. Works on indices, without torch.
//
//   DDP_ASSIGN_OR_RETURN(DistributedSampler sampler,
//                        DistributedSampler::Create(train.size(), {.num_replicas = world_size,
//                                                                  .rank = rank}));
//   sampler.set_epoch(epoch);
//   std::vector<int64_t> indices = sampler.Indices();  // for a Loader; or sampler.ShareFrom(0)
//
// Orders other than those of `shuffle`: Create(sampler, …), order.h.
//
// Not collective: each rank computes its share of the global order by itself.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/data/order.h"

namespace ddp::data {

// The part of an epoch that one rank reads: every stride-th position of its order, from `first` on.
// A value.
struct Share {
  int64_t size = 0;  // examples of this rank
  int64_t first = 0;
  int64_t stride = 1;
  Order order = nullptr;
  int64_t positions = 1;  // of the order; those behind its end, padding, begin anew
  // These and the examples' positions determine their random numbers (random.h).
  int64_t seed = 0;
  int64_t epoch = 0;

  // This rank's example `i`, in [0, size), has this position in the epoch, and this index.
  int64_t Position(int64_t i) const { return first + i * stride; }
  int64_t Index(int64_t i) const { return order(Position(i) % positions); }

  // Tells the order of the epoch from others, by where it begins; the same on all ranks; not 0.
  int64_t Fingerprint() const;
};

// The whole of a list of indices, at positions 0, 1, …
Share ShareOf(std::vector<int64_t> indices);

struct DistributedSamplerOptions {
  int num_replicas = 1;    // world size, >= 1
  int rank = 0;            // in [0, num_replicas)
  bool shuffle = true;     // false: the dataset's own order
  int64_t seed = 0;        // the same on all ranks; also of the examples' random numbers
  bool drop_last = false;  // true: drop the uneven tail instead of padding
  // If false, without drop_last, the sampler neither pads nor drops: higher ranks may have one
  // example fewer, and train with Join (ddp/join.h). PyTorch's sampler does not have it.
  bool pad = true;
};

// In training every rank gets the same number of examples, unless `pad` is false. Gives exactly the
// indices of torch.utils.data.DistributedSampler: with R ranks, rank r takes positions r, r + R, r
// + 2R, … of the epoch's order, which depends on (seed, epoch) only. If the dataset's size n is not
// a multiple of R, the order is padded with its own beginning (repeatedly, if n < R) or, with
// drop_last, truncated to a multiple of R (to nothing, if n < R).
//
// To resume within an epoch, at any world size, pass `start`: the first `start` positions of the
// epoch's order are left out, and the rest is distributed as above. If the world size is unchanged
// and `start` is a multiple of R, each rank gets the rest of its own examples. In any case every
// remaining example is used once, plus padding at the end.
//
// A value; thread-compatible.
class DistributedSampler {
 public:
  // InvalidArgument for an empty dataset, num_replicas < 1 or a rank outside [0, num_replicas).
  static absl::StatusOr<DistributedSampler> Create(int64_t dataset_size,
                                                   const DistributedSamplerOptions& options);
  // The same for the orders of `sampler`, the same on all ranks, whose positions are distributed as
  // those of a shuffled data set: `shuffle` has no effect, and `dataset_size` above is size().
  static absl::StatusOr<DistributedSampler> Create(SharedSampler sampler,
                                                   const DistributedSamplerOptions& options);

  // Call it before Indices() in each epoch, with the same number on all ranks. Otherwise every
  // epoch has the order of epoch 0.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  // Number of this rank's examples from position `start` >= 0 of the epoch's order to its end. 0 if
  // start >= dataset_size.
  int64_t num_samples(int64_t start = 0) const;

  // The same of any rank.
  int64_t num_samples_of(int rank, int64_t start = 0) const;

  // num_samples of rank 0, which has the most; all ranks have as many unless `pad` is false.
  int64_t max_num_samples(int64_t start = 0) const;

  // Samples of all ranks, from position 0: includes padding, excludes dropped examples.
  int64_t total_size() const;

  // This rank's num_samples(start) examples of the current epoch. Throws what the sampler throws.
  Share ShareFrom(int64_t start) const;

  // Their indices. The sampler must have an end.
  std::vector<int64_t> Indices(int64_t start = 0) const;

 private:
  DistributedSampler(SharedSampler sampler, const DistributedSamplerOptions& options)
      : options_(options), sampler_(std::move(sampler)), dataset_size_(sampler_->size()) {}

  DistributedSamplerOptions options_;
  SharedSampler sampler_;
  int64_t dataset_size_;
  int64_t epoch_ = 0;
};

struct EvaluationSamplerOptions {
  int num_replicas = 1;  // world size, >= 1
  int rank = 0;          // in [0, num_replicas)
  int64_t seed = 0;      // the same on all ranks; of the examples' random numbers
};

// In evaluation every example is on exactly one rank, so sums over ranks are sums over the dataset.
// Rank r has the r-th of R contiguous blocks, whose sizes differ by at most one, longer ones first:
// results gathered in rank order are in the dataset's order. Ranks may have different numbers of
// batches, or none, so the evaluated module must not call collectives.
//
// A value; immutable.
class EvaluationSampler {
 public:
  // InvalidArgument for an empty dataset, num_replicas < 1 or a rank outside [0, num_replicas).
  static absl::StatusOr<EvaluationSampler> Create(int64_t dataset_size,
                                                  const EvaluationSamplerOptions& options);

  // Number of examples on this rank.
  int64_t num_samples() const { return end_ - begin_; }

  // This rank's indices: begin, begin + 1, …
  std::vector<int64_t> Indices() const;

  // The same for a loader. An example has the random numbers of its place in the dataset, in each
  // evaluation and at any world size.
  Share AsShare() const;

 private:
  EvaluationSampler(int64_t begin, int64_t end, int64_t positions, int64_t seed)
      : begin_(begin), end_(end), positions_(positions), seed_(seed) {}

  int64_t begin_;
  int64_t end_;
  int64_t positions_;  // of the dataset
  int64_t seed_;
};

}  // namespace ddp::data
