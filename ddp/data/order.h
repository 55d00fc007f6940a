// The order of the examples of an epoch: samplers of several kinds, and of one's own. Works on
// indices, without torch. DistributedSampler (sampler.h) divides an order among the ranks.
//
//   struct EvenFirst : ddp::data::Sampler {
//     int64_t size() const override { return 100; }
//     Order OrderOf(int64_t epoch) const override { return Listed({0, 2, 4, …}); }
//   };
//   DDP_ASSIGN_OR_RETURN(auto balanced, WeightedRandomSampler(weights, {.seed = 1}));
//   trainer_options.sampler = balanced;
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::data {

// The index of the example at each position 0 … size-1 of an epoch. Thread-safe: the threads of
// loaders call it.
using Order = std::function<int64_t(int64_t position)>;

// The order that is written down.
Order Listed(std::vector<int64_t> indices);

// The size of samplers without an end. A training with one needs a maximum of steps.
inline constexpr int64_t kEndless = int64_t{1} << 52;

// Decides which examples an epoch has, in which order. It must depend on nothing but the epoch, and
// what the sampler was made from: then it is the same on all ranks, and after a resume.
// Thread-safe.
class Sampler {
 public:
  virtual ~Sampler() = default;

  // Positions in each epoch; kEndless: they do not end.
  virtual int64_t size() const = 0;

  // Examples of the data set that it is made for: all indices are below it. A sampler whose
  // positions are not as many says so, for mixtures.
  virtual int64_t num_examples() const { return size(); }

  // The order of `epoch`, counted from 0. May outlive the sampler. May throw.
  virtual Order OrderOf(int64_t epoch) const = 0;
};

using SharedSampler = std::shared_ptr<const Sampler>;

// 0 … size-1, in each epoch. InvalidArgument for a size below 1, here and below.
absl::StatusOr<SharedSampler> SequentialSampler(int64_t size);

// Each of 0 … size-1 once: RandomPermutation(size, seed + epoch), which is PyTorch's.
absl::StatusOr<SharedSampler> RandomSampler(int64_t size, int64_t seed);

struct WeightedOptions {
  int64_t num_samples = 0;  // positions of an epoch; 0: as many as there are weights
  bool replacement = true;  // false: no example twice in an epoch
  int64_t seed = 0;
};

// Draws each position by the weights, which need not sum to 1: torch's WeightedRandomSampler, with
// other random numbers. InvalidArgument: a weight is negative or not finite, all are 0, or without
// replacement there are fewer weights above 0 than num_samples.
absl::StatusOr<SharedSampler> WeightedRandomSampler(std::vector<double> weights,
                                                    const WeightedOptions& options);

// One epoch that does not end: epoch 0 of `passes`, then its epoch 1, and so on. No batch is short
// and nothing is padded between them.
absl::StatusOr<SharedSampler> InfiniteSampler(SharedSampler passes);

struct MixtureSource {
  // It samples the source alone; its epochs follow each other as it is used up.
  SharedSampler sampler;
  double weight = 1;
  // Examples of the source, whose indices are 0 … size-1. 0: sampler->num_examples().
  int64_t size = 0;
};

struct MixtureOptions {
  int64_t num_samples = 0;  // positions of an epoch; 0: the sum of the sources' sizes
  int64_t seed = 0;
};

// A mixture by weights: each position is of a source drawn by the weights, and is the next example
// in that source's own order. Its indices are those of the sources one after the other: index i of
// the second is i + the size of the first, as in ConcatDataset (concat.h) and in any data set that
// numbers the examples of its parts so. In epoch e + 1 a source goes on with another of its epochs,
// and one without an end where epoch e has stopped in it; to find that place in a resumed run, all
// epochs before are drawn once more, at some 10 million positions per second. Takes 8 bytes per
// position. InvalidArgument for weights as above, or an endless num_samples. Its orders throw
// std::out_of_range where a source's sampler gives an index that is not below the source's size.
absl::StatusOr<SharedSampler> MixtureSampler(std::vector<MixtureSource> sources,
                                             const MixtureOptions& options);

struct ShardOptions {
  bool shuffle = true;
  // Positions within which examples change places; 1: only the shards do.
  int64_t buffer_size = 10'000;
  int64_t seed = 0;
};

// Orders streams (stream.h): the shards are in an order drawn for the epoch, and within that
// sequence each `buffer_size` examples in an order drawn for them. Reads are nearly sequential, and
// memory does not grow with the number of examples. `shard_sizes`: examples of each shard, whose
// indices follow each other; InvalidArgument if one is negative or all are 0.
absl::StatusOr<SharedSampler> ShardSampler(std::vector<int64_t> shard_sizes,
                                           const ShardOptions& options);

// A permutation of 0 … n-1; n >= 0. Same result as Python's
//   torch.randperm(n, generator=torch.Generator().manual_seed(seed))
// so that a run in Python and one here see the same examples in the same order. Like PyTorch's CPU
// generator, uses only the low 32 bits of `seed`. Takes 8n bytes. Thread-safe.
std::vector<int64_t> RandomPermutation(int64_t n, uint64_t seed);

namespace internal {

// PyTorch's two algorithms, and the length from which it uses the second: there the first one's
// 32-bit random numbers are no longer close to uniform.
inline constexpr int64_t kLongPermutation = 0xffffffff / 20;
std::vector<int64_t> ShortPermutation(int64_t n, uint64_t seed);
std::vector<int64_t> LongPermutation(int64_t n, uint64_t seed);

}  // namespace internal

}  // namespace ddp::data
