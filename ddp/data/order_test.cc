#include "ddp/data/order.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "ddp/data/random.h"
#include "ddp/data/sampler.h"
#include "gtest/gtest.h"

namespace ddp::data {
namespace {

using Indices = std::vector<int64_t>;

Indices All(const SharedSampler& sampler, int64_t epoch, int64_t size = 0) {
  const Order order = sampler->OrderOf(epoch);
  Indices indices;
  for (int64_t p = 0; p < (size > 0 ? size : sampler->size()); ++p) indices.push_back(order(p));
  return indices;
}

Indices Sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

Indices Range(int64_t n, int64_t first = 0) {
  Indices indices(n);
  std::iota(indices.begin(), indices.end(), first);
  return indices;
}

// Known answers of the authors' Random123: counters and keys of zeros, of ones, and digits of pi.
TEST(RandomTest, IsPhilox) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(Random::Philox({0, 0, 0, 0}, 0),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(Random::Philox({ones, ones, ones, ones}, ~uint64_t{0}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Random::Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomTest, NoTwoPlacesShareNumbers) {
  std::set<uint64_t> seen;
  int places = 0;
  for (const int64_t seed : {-1, 0, 1}) {
    for (const int64_t epoch : {0, 1, 2}) {
      for (const int64_t position : {int64_t{0}, int64_t{1}, int64_t{1} << 40}) {
        for (const uint64_t stream : {0, 1}) {
          Random random(seed, epoch, position, stream);
          for (int i = 0; i < 5; ++i) seen.insert(random.Bits64());
          places += 5;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), places);
}

TEST(RandomTest, DistributionsHaveTheirMoments) {
  Random random(1, 2, 3);
  constexpr int kDraws = 100'000;
  double uniform = 0, normal = 0, squares = 0, heads = 0;
  std::map<int64_t, int> below;
  for (int i = 0; i < kDraws; ++i) {
    const double u = random.Uniform(), z = random.Normal();
    ASSERT_TRUE(u >= 0 && u < 1);
    uniform += u;
    normal += z;
    squares += z * z;
    heads += random.Bernoulli(0.25);
    ++below[random.Below(5)];
  }
  EXPECT_NEAR(uniform / kDraws, 0.5, 0.01);
  EXPECT_NEAR(normal / kDraws, 0, 0.02);
  EXPECT_NEAR(squares / kDraws, 1, 0.03);
  EXPECT_NEAR(heads / kDraws, 0.25, 0.01);
  ASSERT_EQ(below.size(), 5);
  for (const auto& [value, times] : below) EXPECT_NEAR(times, kDraws / 5, 1000) << value;
  EXPECT_EQ(below.begin()->first, 0);
}

TEST(OrderTest, SequentialAndRandom) {
  const auto sequential = SequentialSampler(4).value();
  EXPECT_EQ(All(sequential, 3), Range(4));
  const auto random = RandomSampler(10, /*seed=*/5).value();
  EXPECT_EQ(All(random, 2), RandomPermutation(10, 7));
  EXPECT_FALSE(RandomSampler(0, 1).ok());
}

TEST(OrderTest, WeightedDrawsByTheWeights) {
  const auto sampler = WeightedRandomSampler({1, 0, 3}, {.num_samples = 40'000, .seed = 2}).value();
  std::map<int64_t, int> seen;
  for (const int64_t index : All(sampler, 0)) ++seen[index];
  EXPECT_EQ(seen.count(1), 0);
  EXPECT_NEAR(seen[2], 30'000, 500);
  EXPECT_EQ(All(sampler, 1), All(sampler, 1));
  EXPECT_NE(All(sampler, 1), All(sampler, 0));

  const auto once = WeightedRandomSampler({1, 0, 3, 2}, {.num_samples = 3, .replacement = false});
  std::map<int64_t, int> first;
  for (int64_t epoch = 0; epoch < 2000; ++epoch) {
    const Indices drawn = All(*once, epoch);
    ASSERT_EQ(Sorted(drawn), Indices({0, 2, 3}));
    ++first[drawn[0]];
  }
  EXPECT_NEAR(first[2], 1000, 100);
  EXPECT_NEAR(first[0], 333, 70);
}

TEST(OrderTest, WeightsAreChecked) {
  const auto message = [](const std::vector<double>& weights, const WeightedOptions& options) {
    return std::string(WeightedRandomSampler(weights, options).status().message());
  };
  EXPECT_NE(message({1, -1}, {}).find("weight 1 of a sampler is -1"), std::string::npos);
  EXPECT_NE(message({0, 0}, {}).find("add up to 0"), std::string::npos);
  EXPECT_NE(message({}, {}).find("add up to 0"), std::string::npos);
  EXPECT_NE(message({1, 0}, {.num_samples = 2, .replacement = false})
                .find("cannot draw 2 examples without replacement from 1"),
            std::string::npos);
}

TEST(OrderTest, InfiniteGoesOnWithTheNextPass) {
  const auto passes = RandomSampler(5, /*seed=*/1).value();
  const auto endless = InfiniteSampler(passes).value();
  EXPECT_EQ(endless->size(), kEndless);
  Indices expected;
  for (int64_t pass = 0; pass < 6; ++pass) {
    for (const int64_t index : All(passes, pass)) expected.push_back(index);
  }
  EXPECT_EQ(All(endless, 0, 30), expected);
  // Any position without those before.
  EXPECT_EQ(endless->OrderOf(0)(17), expected[17]);
  // Divided among ranks, from any position.
  auto rank = DistributedSampler::Create(endless, {.num_replicas = 3, .rank = 1}).value();
  const Share share = rank.ShareFrom(7);
  EXPECT_GT(share.size, int64_t{1} << 48);
  for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(share.Index(i), expected[8 + 3 * i]);
}

TEST(OrderTest, MixtureTakesEachSourceInItsOwnOrder) {
  const auto small = RandomSampler(10, 1).value(), large = SequentialSampler(1000).value();
  const auto mixture =
      MixtureSampler({{.sampler = small, .weight = 1}, {.sampler = large, .weight = 3}},
                     {.num_samples = 400, .seed = 9})
          .value();
  EXPECT_EQ(mixture->size(), 400);
  Indices of_small, of_large;
  for (const int64_t index : All(mixture, 0)) {
    (index < 10 ? of_small : of_large).push_back(index);
  }
  EXPECT_NEAR(static_cast<double>(of_small.size()), 100, 30);
  // The small source is used up, and begins its next epoch.
  for (size_t pass = 0; (pass + 1) * 10 <= of_small.size(); ++pass) {
    const Indices part(of_small.begin() + static_cast<int64_t>(pass) * 10,
                       of_small.begin() + static_cast<int64_t>(pass) * 10 + 10);
    EXPECT_EQ(part, All(small, static_cast<int64_t>(pass)));
  }
  EXPECT_EQ(of_large, Range(static_cast<int64_t>(of_large.size()), 10));
  EXPECT_EQ(All(mixture, 1), All(mixture, 1));
  EXPECT_NE(All(mixture, 1), All(mixture, 0));
  // In the next epoch the small source has other passes.
  std::set<Indices> passes;
  size_t full = 0;
  for (const int64_t epoch : {0, 1}) {
    Indices part;
    for (const int64_t index : All(mixture, epoch)) {
      if (index < 10) part.push_back(index);
      if (part.size() < 10) continue;
      passes.insert(std::exchange(part, {}));
      ++full;
    }
  }
  EXPECT_EQ(passes.size(), full);
  EXPECT_EQ(MixtureSampler({{.sampler = small}, {.sampler = large}}, {}).value()->size(), 1010);
  EXPECT_FALSE(MixtureSampler({}, {}).ok());
  EXPECT_FALSE(MixtureSampler({{.sampler = nullptr}}, {}).ok());
}

// A sampler may have fewer positions than its data set examples, or more.
TEST(OrderTest, MixtureKnowsTheExamplesOfItsSources) {
  const auto few = WeightedRandomSampler(std::vector<double>(1000, 1), {.num_samples = 100});
  const auto many = WeightedRandomSampler(std::vector<double>(10, 1), {.num_samples = 500});
  const auto endless = InfiniteSampler(*few);
  EXPECT_EQ((*few)->num_examples(), 1000);
  EXPECT_EQ((*many)->num_examples(), 10);
  EXPECT_EQ((*endless)->num_examples(), 1000);
  const auto mixture = MixtureSampler(
      {{.sampler = *few}, {.sampler = *many}, {.sampler = *endless}}, {.num_samples = 3000});
  ASSERT_TRUE(mixture.ok()) << mixture.status();
  std::map<int64_t, int64_t> of_source;
  for (const int64_t index : All(*mixture, 0)) {
    ASSERT_LT(index, 2010);
    ++of_source[index < 1000 ? 0 : index < 1010 ? 1 : 2];
  }
  for (const int64_t source : {0, 1, 2}) {
    EXPECT_NEAR(static_cast<double>(of_source[source]), 1000, 150) << source;
  }
}

TEST(OrderTest, AnIndexOutsideASourceIsRefused) {
  struct EvenNumbers : Sampler {
    int64_t size() const override { return 50; }
    Order OrderOf(int64_t) const override {
      return [](int64_t position) { return 2 * position; };
    }
  };
  const auto make = [](int64_t size) {
    return MixtureSampler({{.sampler = std::make_shared<EvenNumbers>(), .size = size},
                           {.sampler = SequentialSampler(10).value()}},
                          {.num_samples = 400})
        .value();
  };
  EXPECT_EQ(All(make(100), 0).size(), 400);
  try {
    make(0)->OrderOf(0);
    FAIL() << "indices of another source";
  } catch (const std::out_of_range& error) {
    EXPECT_NE(std::string(error.what()).find("source 0 of a mixture has 50 examples"),
              std::string::npos)
        << error.what();
  }
}

// Over the epochs it is read as it is alone, so that no part of a large source is left out.
TEST(OrderTest, MixtureGoesOnInASourceWithoutAnEnd) {
  const auto endless = InfiniteSampler(SequentialSampler(1000).value()).value();
  const auto make = [&] {
    return MixtureSampler({{.sampler = RandomSampler(10, 1).value(), .weight = 1},
                           {.sampler = endless, .weight = 3, .size = 1000}},
                          {.num_samples = 200, .seed = 9})
        .value();
  };
  const auto mixture = make();
  Indices of_endless;
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    for (const int64_t index : All(mixture, epoch)) {
      if (index >= 10) of_endless.push_back(index - 10);
    }
  }
  ASSERT_GT(of_endless.size(), 1000);
  EXPECT_EQ(of_endless, All(endless, 0, static_cast<int64_t>(of_endless.size())));
  // An epoch is the same without those before it, as in a run that is resumed.
  EXPECT_EQ(All(make(), 5), All(mixture, 5));
}

TEST(OrderTest, ShardsAndTheirBuffersAreShuffled) {
  const std::vector<int64_t> sizes = {40, 0, 25, 35};
  const auto sampler = ShardSampler(sizes, {.buffer_size = 8, .seed = 3}).value();
  EXPECT_EQ(sampler->size(), 100);
  const auto shard_of = [](int64_t index) { return index < 40 ? 0 : index < 65 ? 2 : 3; };
  std::set<Indices> orders_of_shards;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    const Indices order = All(sampler, epoch);
    ASSERT_EQ(Sorted(order), Range(100));
    Indices shards;
    for (const int64_t index : order) {
      if (std::find(shards.begin(), shards.end(), shard_of(index)) == shards.end()) {
        shards.push_back(shard_of(index));
      }
    }
    orders_of_shards.insert(shards);
    // Each buffer's examples follow each other in the sequence of shards.
    const auto plain = ShardSampler(sizes, {.buffer_size = 1, .seed = 3}).value();
    const Indices sequence = All(plain, epoch);
    for (int64_t from = 0; from < 100; from += 8) {
      const int64_t to = std::min<int64_t>(100, from + 8);
      ASSERT_EQ(Sorted({order.begin() + from, order.begin() + to}),
                Sorted({sequence.begin() + from, sequence.begin() + to}));
    }
    EXPECT_NE(order, sequence);
    // Each buffer in an order of its own.
    std::set<Indices> within;
    for (size_t from = 0; from + 8 <= 100; from += 8) {
      Indices places;
      for (size_t i = from; i < from + 8; ++i) {
        places.push_back(std::find(sequence.begin(), sequence.end(), order[i]) - sequence.begin() -
                         static_cast<int64_t>(from));
      }
      within.insert(places);
    }
    EXPECT_GT(within.size(), 10);
  }
  EXPECT_EQ(orders_of_shards.size(), 6);
  EXPECT_EQ(All(ShardSampler(sizes, {.shuffle = false}).value(), 4), Range(100));
  EXPECT_FALSE(ShardSampler({0, 0}, {}).ok());
  EXPECT_FALSE(ShardSampler({1}, {.buffer_size = 0}).ok());
}

// Also within one shard, whose place is the same.
TEST(OrderTest, BuffersAreShuffledAnewInEachEpoch) {
  const auto sampler = ShardSampler({100}, {.buffer_size = 8, .seed = 3}).value();
  EXPECT_EQ(All(sampler, 1), All(sampler, 1));
  EXPECT_NE(All(sampler, 1), All(sampler, 0));
}

TEST(ShareTest, FingerprintsTellOrders) {
  std::set<int64_t> seen;
  const auto add = [&](const SharedSampler& sampler, int64_t epoch, int world) {
    for (int rank = 0; rank < world; ++rank) {
      auto mine =
          DistributedSampler::Create(sampler, {.num_replicas = world, .rank = rank}).value();
      mine.set_epoch(epoch);
      seen.insert(mine.ShareFrom(5 * rank).Fingerprint());
    }
  };
  add(RandomSampler(100, 1).value(), 0, 3);
  EXPECT_EQ(seen.size(), 1);
  add(RandomSampler(100, 1).value(), 3, 1);
  add(RandomSampler(101, 1).value(), 0, 1);
  add(SequentialSampler(100).value(), 0, 2);
  add(ShardSampler({50, 50}, {.buffer_size = 10}).value(), 0, 1);
  EXPECT_EQ(seen.size(), 5);
}

// A run on 4 ranks goes on with 2 and then 3: each position once, each with its own numbers.
TEST(ShareTest, PositionsAreThoseOfTheWholeOrder) {
  const auto sampler = RandomSampler(101, 1).value();
  std::map<int64_t, int64_t> seen;  // position → index
  int64_t start = 0;
  const auto read = [&](int world, int64_t batches) {
    constexpr int64_t kBatch = 4;
    for (int rank = 0; rank < world; ++rank) {
      auto mine =
          DistributedSampler::Create(sampler, {.num_replicas = world, .rank = rank, .seed = 5})
              .value();
      mine.set_epoch(2);
      const Share share = mine.ShareFrom(start);
      EXPECT_EQ(share.seed, 5);
      EXPECT_EQ(share.epoch, 2);
      for (int64_t i = 0; i < std::min(share.size, batches * kBatch); ++i) {
        ASSERT_TRUE(seen.emplace(share.Position(i), share.Index(i)).second);
      }
    }
    start += batches * kBatch * world;
  };
  read(4, 3);
  read(2, 2);
  read(3, 100);
  const Indices order = All(sampler, 2);
  for (int64_t p = 0; p < 101; ++p) ASSERT_EQ(seen[p], order[p]) << p;
}

}  // namespace
}  // namespace ddp::data
