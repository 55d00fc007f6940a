#include "ddp/data/order.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/data/random.h"

namespace ddp::data {
namespace {

// Random::stream of what is drawn here.
enum Stream : uint64_t { kWeighted = 1, kMixture, kShards, kBuffer };

absl::Status CheckSize(int64_t size) {
  if (size > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("cannot sample from a dataset of ", size, " examples"));
}

// Weights as sums of those up to each.
absl::StatusOr<std::vector<double>> Cumulative(const std::vector<double>& weights) {
  std::vector<double> sums;
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat("weight ", i, " of a sampler is ", weights[i],
                                                     "; it must be a finite number from 0 on"));
    }
    sums.push_back(sum += weights[i]);
  }
  if (sum > 0 && std::isfinite(sum)) return sums;
  return absl::InvalidArgumentError(absl::StrCat("the ", weights.size(),
                                                 " weights of a sampler add up to ", sum,
                                                 "; at least one must be above 0"));
}

int64_t Draw(const std::vector<double>& sums, Random random) {
  const double drawn = random.Uniform() * sums.back();
  const auto found = std::upper_bound(sums.begin(), sums.end(), drawn);
  // Rounding may make it the sum itself: then it is the last weight above 0.
  return (found != sums.end() ? found : std::lower_bound(sums.begin(), sums.end(), sums.back())) -
         sums.begin();
}

std::vector<int64_t> Shuffled(int64_t n, Random random) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), int64_t{0});
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  return order;
}

// The last few values of a function that is slow. Thread-safe.
template <typename Value>
class Recent {
 public:
  template <typename Make>
  std::shared_ptr<const Value> Get(int64_t key, const Make& make) {
    constexpr size_t kKept = 4;
    const std::lock_guard lock(mutex_);
    for (const auto& [number, value] : kept_) {
      if (number == key) return value;
    }
    kept_.emplace_front(key, std::make_shared<const Value>(make(key)));
    if (kept_.size() > kKept) kept_.pop_back();
    return kept_.front().second;
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<int64_t, std::shared_ptr<const Value>>> kept_;
};

class OfFunction final : public Sampler {
 public:
  OfFunction(int64_t size, std::function<Order(int64_t epoch)> order)
      : OfFunction(size, size, std::move(order)) {}
  OfFunction(int64_t size, int64_t examples, std::function<Order(int64_t epoch)> order)
      : size_(size), examples_(examples), order_(std::move(order)) {}
  int64_t size() const override { return size_; }
  int64_t num_examples() const override { return examples_; }
  Order OrderOf(int64_t epoch) const override { return order_(epoch); }

 private:
  const int64_t size_;
  const int64_t examples_;
  const std::function<Order(int64_t epoch)> order_;
};

// The examples with the smallest of exponential variables of these rates (Efraimidis and Spirakis,
// "Weighted random sampling with a reservoir", 2006).
std::vector<int64_t> DrawWithoutReplacement(const std::vector<double>& weights, int64_t wanted,
                                            int64_t seed, int64_t epoch) {
  std::vector<std::pair<double, int64_t>> times;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    const auto index = static_cast<int64_t>(i);
    times.emplace_back(-std::log(1 - Random(seed, epoch, index, kWeighted).Uniform()) / weights[i],
                       index);
  }
  std::partial_sort(times.begin(), times.begin() + wanted, times.end());
  std::vector<int64_t> drawn;
  for (int64_t i = 0; i < wanted; ++i) drawn.push_back(times[i].second);
  return drawn;
}

// How often each source of a mixture was drawn in the epochs before one. Thread-safe.
class DrawnBefore {
 public:
  // `add`: adds those of an epoch.
  template <typename Add>
  std::vector<int64_t> Get(int64_t epoch, size_t sources, const Add& add) {
    const std::lock_guard lock(mutex_);
    if (epoch < epoch_ || counts_.empty()) {
      counts_.assign(sources, 0);
      epoch_ = 0;
    }
    for (; epoch_ < epoch; ++epoch_) add(epoch_, counts_);
    return counts_;
  }

 private:
  std::mutex mutex_;
  int64_t epoch_ = 0;
  std::vector<int64_t> counts_;
};

struct Mixture {
  std::vector<MixtureSource> sources;
  std::vector<double> sums;      // of the weights
  std::vector<int64_t> offsets;  // of the sources' indices
  int64_t num_samples = 0;
  int64_t seed = 0;
  bool has_endless = false;
  std::shared_ptr<DrawnBefore> drawn_before = std::make_shared<DrawnBefore>();

  // The source of a position.
  int64_t SourceAt(int64_t epoch, int64_t position) const {
    return Draw(sums, Random(seed, epoch, position, kMixture));
  }

  Order OrderOf(int64_t epoch) const {
    std::vector<int64_t> indices;
    indices.reserve(num_samples);
    struct Place {
      int64_t pass = 0, position = 0;
      Order order;
    };
    std::vector<Place> places(sources.size());
    if (has_endless) {
      const auto add = [this](int64_t earlier, std::vector<int64_t>& counts) {
        for (int64_t p = 0; p < num_samples; ++p) ++counts[SourceAt(earlier, p)];
      };
      const std::vector<int64_t> before = drawn_before->Get(epoch, sources.size(), add);
      for (size_t i = 0; i < sources.size(); ++i) {
        if (sources[i].sampler->size() < kEndless) continue;
        places[i].position = before[i];
        places[i].order = sources[i].sampler->OrderOf(0);
      }
    }
    for (int64_t p = 0; p < num_samples; ++p) {
      const int64_t source = SourceAt(epoch, p);
      const Sampler& sampler = *sources[source].sampler;
      Place& place = places[source];
      if (place.position == sampler.size()) {
        ++place.pass;
        place.position = 0;
        place.order = nullptr;
      }
      if (!place.order) {
        // More than one epoch of the mixture can use up.
        const int64_t most = num_samples / sampler.size() + 1;
        place.order = sampler.OrderOf(epoch * most + place.pass);
      }
      const int64_t index = place.order(place.position++);
      if (index < 0 || index >= sources[source].size) {
        throw std::out_of_range(absl::StrCat(
            "source ", source, " of a mixture has ", sources[source].size,
            " examples, and its sampler gives index ", index, ": set MixtureSource::size"));
      }
      indices.push_back(offsets[source] + index);
    }
    return Listed(std::move(indices));
  }
};

struct Shards {
  std::vector<int64_t> sizes;
  std::vector<int64_t> offsets;  // of the shards' indices
  int64_t total = 0;
  ShardOptions options;

  Order OrderOf(int64_t epoch) const {
    struct Epoch {
      std::vector<int64_t> begins;  // positions in the sequence of shards
      std::vector<int64_t> firsts;  // indices there
      Recent<std::vector<int64_t>> buffers;
    };
    auto state = std::make_shared<Epoch>();
    const auto count = static_cast<int64_t>(sizes.size());
    const std::vector<int64_t> shards =
        Shuffled(options.shuffle ? count : 0, Random(options.seed, epoch, /*position=*/0, kShards));
    int64_t begin = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t shard = options.shuffle ? shards[i] : i;
      if (sizes[shard] == 0) continue;
      state->begins.push_back(begin);
      state->firsts.push_back(offsets[shard]);
      begin += sizes[shard];
    }
    return [state, total = total, options = options, epoch](int64_t position) {
      if (options.shuffle && options.buffer_size > 1) {
        const int64_t buffer = position / options.buffer_size;
        const int64_t from = buffer * options.buffer_size;
        const auto places = state->buffers.Get(buffer, [&](int64_t number) {
          return Shuffled(std::min(options.buffer_size, total - from),
                          Random(options.seed, epoch, number, kBuffer));
        });
        position = from + (*places)[position - from];
      }
      const auto shard = std::upper_bound(state->begins.begin(), state->begins.end(), position) -
                         1 - state->begins.begin();
      return state->firsts[shard] + position - state->begins[shard];
    };
  }
};

}  // namespace

Order Listed(std::vector<int64_t> indices) {
  auto list = std::make_shared<const std::vector<int64_t>>(std::move(indices));
  return [list](int64_t position) { return (*list)[position]; };
}

absl::StatusOr<SharedSampler> SequentialSampler(int64_t size) {
  DDP_RETURN_IF_ERROR(CheckSize(size));
  return std::make_shared<OfFunction>(
      size, [](int64_t) { return [](int64_t position) { return position; }; });
}

absl::StatusOr<SharedSampler> RandomSampler(int64_t size, int64_t seed) {
  DDP_RETURN_IF_ERROR(CheckSize(size));
  return std::make_shared<OfFunction>(size, [size, seed](int64_t epoch) {
    // Unsigned: the sum wraps around instead of being undefined.
    return Listed(
        RandomPermutation(size, static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch)));
  });
}

absl::StatusOr<SharedSampler> WeightedRandomSampler(std::vector<double> weights,
                                                    const WeightedOptions& options) {
  DDP_ASSIGN_OR_RETURN(std::vector<double> sums, Cumulative(weights));
  const int64_t all = static_cast<int64_t>(weights.size());
  const int64_t samples = options.num_samples != 0 ? options.num_samples : all;
  DDP_RETURN_IF_ERROR(CheckSize(samples));
  const int64_t seed = options.seed;
  if (options.replacement) {
    auto shared = std::make_shared<const std::vector<double>>(std::move(sums));
    return std::make_shared<OfFunction>(samples, all, [shared, seed](int64_t epoch) {
      return [shared, seed, epoch](int64_t position) {
        return Draw(*shared, Random(seed, epoch, position, kWeighted));
      };
    });
  }
  const int64_t usable = all - std::count(weights.begin(), weights.end(), 0.0);
  if (samples > usable) {
    return absl::InvalidArgumentError(absl::StrCat("cannot draw ", samples,
                                                   " examples without replacement from ", usable,
                                                   " whose weights are above 0"));
  }
  return std::make_shared<OfFunction>(
      samples, all, [weights = std::move(weights), samples, seed](int64_t epoch) {
        return Listed(DrawWithoutReplacement(weights, samples, seed, epoch));
      });
}

absl::StatusOr<SharedSampler> InfiniteSampler(SharedSampler passes) {
  DDP_RETURN_IF_ERROR(CheckSize(passes->size()));
  return std::make_shared<OfFunction>(kEndless, passes->num_examples(), [passes](int64_t) {
    auto orders = std::make_shared<Recent<Order>>();
    return [passes, orders, size = passes->size()](int64_t position) {
      const auto order =
          orders->Get(position / size, [&](int64_t pass) { return passes->OrderOf(pass); });
      return (*order)(position % size);
    };
  });
}

absl::StatusOr<SharedSampler> MixtureSampler(std::vector<MixtureSource> sources,
                                             const MixtureOptions& options) {
  Mixture mixture;
  mixture.seed = options.seed;
  std::vector<double> weights;
  int64_t examples = 0;
  for (MixtureSource& source : sources) {
    const int64_t positions = source.sampler == nullptr ? 0 : source.sampler->size();
    const bool is_endless = positions >= kEndless;
    mixture.has_endless = mixture.has_endless || is_endless;
    if (source.size == 0 && positions > 0) source.size = source.sampler->num_examples();
    if (positions <= 0 || source.size <= 0 || source.size >= kEndless) {
      return absl::InvalidArgumentError(
          absl::StrCat("source ", weights.size(),
                       " of a mixture has no examples, or none are "
                       "known: give its sampler, and its size if the sampler is endless"));
    }
    mixture.offsets.push_back(examples);
    examples += source.size;
    weights.push_back(source.weight);
  }
  DDP_ASSIGN_OR_RETURN(mixture.sums, Cumulative(weights));
  mixture.sources = std::move(sources);
  mixture.num_samples = options.num_samples != 0 ? options.num_samples : examples;
  DDP_RETURN_IF_ERROR(CheckSize(mixture.num_samples));
  if (mixture.num_samples >= kEndless) {
    return absl::InvalidArgumentError("the epoch of a mixture must have an end: its num_samples");
  }
  const int64_t size = mixture.num_samples;
  return std::make_shared<OfFunction>(
      size, examples,
      [mixture = std::move(mixture)](int64_t epoch) { return mixture.OrderOf(epoch); });
}

absl::StatusOr<SharedSampler> ShardSampler(std::vector<int64_t> shard_sizes,
                                           const ShardOptions& options) {
  Shards shards;
  shards.options = options;
  for (const int64_t size : shard_sizes) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard ", shards.offsets.size(), " has a negative size: ", size));
    }
    shards.offsets.push_back(shards.total);
    shards.total += size;
  }
  DDP_RETURN_IF_ERROR(CheckSize(shards.total));
  if (options.buffer_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("sampler option buffer_size is ",
                                                   options.buffer_size, "; it must be at least 1"));
  }
  shards.sizes = std::move(shard_sizes);
  const int64_t total = shards.total;
  return std::make_shared<OfFunction>(
      total, [shards = std::move(shards)](int64_t epoch) { return shards.OrderOf(epoch); });
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
