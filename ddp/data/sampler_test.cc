#include "ddp/data/sampler.h"

#include <algorithm>
#include <map>

#include "gtest/gtest.h"

namespace ddp::data {
namespace {

using Indices = std::vector<int64_t>;

DistributedSampler Sampler(int64_t size, const DistributedSamplerOptions& options,
                           int64_t epoch = 0) {
  auto sampler = DistributedSampler::Create(size, options);
  EXPECT_TRUE(sampler.ok()) << sampler.status();
  sampler->set_epoch(epoch);
  return *sampler;
}

// Calls f(size, world size) for every pair that the properties below are checked for.
template <typename F>
void ForEverySizeAndWorld(F f) {
  for (int64_t size = 1; size <= 50; ++size) {
    for (int world = 1; world <= 9; ++world) f(size, world);
  }
}

// Expected values: torch.utils.data.DistributedSampler of torch 2.11.
TEST(DistributedSamplerTest, EqualsTorch) {
  EXPECT_EQ(Sampler(10, {.num_replicas = 4, .rank = 1}).Indices(), Indices({1, 9, 2}));
  EXPECT_EQ(Sampler(10, {.num_replicas = 4, .rank = 1}, 1).Indices(), Indices({6, 8, 4}));
  EXPECT_EQ(Sampler(10, {.num_replicas = 4, .rank = 3, .seed = 5, .drop_last = true}, 2).Indices(),
            Indices({4, 6}));
  EXPECT_EQ(Sampler(3, {.num_replicas = 8, .rank = 7}).Indices(), Indices({0}));
  EXPECT_EQ(Sampler(3, {.num_replicas = 8, .rank = 2, .drop_last = true}).Indices(), Indices());
  EXPECT_EQ(Sampler(7, {.num_replicas = 3, .rank = 2, .shuffle = false}).Indices(),
            Indices({2, 5, 1}));
}

// The same loops were run over torch's sampler: one hash over 18,000 samplers' lengths and indices.
TEST(DistributedSamplerTest, EqualsTorchForEverySizeAndWorld) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  };
  ForEverySizeAndWorld([&](int64_t size, int world) {
    for (int rank = 0; rank < world; ++rank) {
      for (bool shuffle : {false, true}) {
        for (bool drop_last : {false, true}) {
          const DistributedSampler sampler = Sampler(size,
                                                     {.num_replicas = world,
                                                      .rank = rank,
                                                      .shuffle = shuffle,
                                                      .seed = 3,
                                                      .drop_last = drop_last},
                                                     size % 4);
          add(sampler.num_samples());
          for (int64_t index : sampler.Indices()) add(index);
        }
      }
    }
  });
  EXPECT_EQ(hash, 0xc6ebe84a24011ee7);
}

TEST(DistributedSamplerTest, PaddedRanksAreEquallyLongAndCoverTheDataset) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    std::map<int64_t, int> seen;
    for (int rank = 0; rank < world; ++rank) {
      const DistributedSampler sampler = Sampler(size, {.num_replicas = world, .rank = rank});
      ASSERT_EQ(sampler.Indices().size(), sampler.num_samples());
      ASSERT_EQ(sampler.total_size(), sampler.num_samples() * world);
      for (int64_t index : sampler.Indices()) ++seen[index];
    }
    ASSERT_EQ(seen.size(), size) << "world " << world;
    int least = seen[0], most = seen[0];
    for (const auto& [index, times] : seen) {
      least = std::min(least, times);
      most = std::max(most, times);
    }
    ASSERT_LE(most - least, 1) << "size " << size << " world " << world;
  });
}

TEST(DistributedSamplerTest, DropLastRepeatsNothing) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    std::map<int64_t, int> seen;
    for (int rank = 0; rank < world; ++rank) {
      for (int64_t index :
           Sampler(size, {.num_replicas = world, .rank = rank, .drop_last = true}).Indices()) {
        ASSERT_EQ(++seen[index], 1);
      }
    }
    ASSERT_EQ(seen.size(), size - size % world);
  });
}

TEST(DistributedSamplerTest, OrderIsAFunctionOfSeedAndEpochAlone) {
  DistributedSampler sampler = Sampler(50, {.seed = 7}, 3);
  const Indices third = sampler.Indices();
  EXPECT_EQ(sampler.Indices(), third);
  sampler.set_epoch(4);
  EXPECT_NE(sampler.Indices(), third);
  sampler.set_epoch(3);
  EXPECT_EQ(sampler.Indices(), third);
  EXPECT_NE(Sampler(50, {.seed = 8}, 3).Indices(), third);
}

TEST(DistributedSamplerTest, GoesOnInTheMiddleWithTheRestOfEachRank) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    for (bool drop_last : {false, true}) {
      for (int rank = 0; rank < world; ++rank) {
        const DistributedSampler sampler =
            Sampler(size, {.num_replicas = world, .rank = rank, .drop_last = drop_last}, 2);
        const Indices whole = sampler.Indices();
        for (int64_t taken = 0; taken <= static_cast<int64_t>(whole.size()); ++taken) {
          ASSERT_EQ(sampler.num_samples(taken * world), whole.size() - taken);
          ASSERT_EQ(sampler.Indices(taken * world), Indices(whole.begin() + taken, whole.end()))
              << "size " << size << " world " << world << " rank " << rank << " taken " << taken;
        }
      }
    }
  });
}

// The first `start` examples may have been taken by a world of any size.
TEST(DistributedSamplerTest, GoesOnInTheMiddleWithAnotherWorld) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    const Indices order = Sampler(size, {}, 3).Indices();
    for (int64_t start = 0; start <= size; ++start) {
      // What the ranks get, one in turn, is the rest of the order, then its beginning.
      Indices dealt;
      std::vector<Indices> shares;
      for (int rank = 0; rank < world; ++rank) {
        shares.push_back(Sampler(size, {.num_replicas = world, .rank = rank}, 3).Indices(start));
        ASSERT_EQ(shares[rank].size(), shares[0].size());
      }
      for (size_t i = 0; i < shares[0].size(); ++i) {
        for (const Indices& share : shares) dealt.push_back(share[i]);
      }
      ASSERT_GE(dealt.size(), size - start);
      ASSERT_LT(dealt.size(), size - start + world);
      for (size_t i = 0; i < dealt.size(); ++i) ASSERT_EQ(dealt[i], order[(start + i) % size]);
    }
  });
}

TEST(DistributedSamplerTest, WithoutPaddingEachExampleIsUsedOnce) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    for (const int64_t start : {int64_t{0}, size / 2, size}) {
      Indices all;
      for (int rank = 0; rank < world; ++rank) {
        auto sampler = DistributedSampler::Create(
            size, {.num_replicas = world, .rank = rank, .seed = 3, .pad = false});
        ASSERT_TRUE(sampler.ok()) << sampler.status();
        const Indices indices = sampler->Indices(start);
        ASSERT_EQ(indices.size(), sampler->num_samples(start));
        ASSERT_EQ(sampler->total_size(), size);
        ASSERT_LE(sampler->num_samples(start), sampler->max_num_samples(start));
        ASSERT_GE(sampler->num_samples(start) + 1, sampler->max_num_samples(start));
        if (rank == 0) {
          ASSERT_EQ(sampler->num_samples(start), sampler->max_num_samples(start));
        }
        all.insert(all.end(), indices.begin(), indices.end());
      }
      ASSERT_EQ(all.size(), size - start);
      std::sort(all.begin(), all.end());
      ASSERT_EQ(std::unique(all.begin(), all.end()), all.end());
    }
  });
}

TEST(DistributedSamplerTest, RefusesWhatMakesNoSense) {
  EXPECT_EQ(DistributedSampler::Create(0, {}).status().message(),
            "cannot sample from a dataset of 0 examples");
  EXPECT_EQ(DistributedSampler::Create(5, {.num_replicas = 0}).status().message(),
            "sampler option num_replicas is 0; it must be at least 1");
  EXPECT_EQ(DistributedSampler::Create(5, {.num_replicas = 2, .rank = 2}).status().message(),
            "sampler option rank is 2; with num_replicas 2 it must be in [0, 1]");
  EXPECT_EQ(DistributedSampler::Create(5, {.rank = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(EvaluationSamplerTest, GivesEveryExampleToOneRank) {
  ForEverySizeAndWorld([](int64_t size, int world) {
    Indices all;
    int64_t least = size, most = 0;
    for (int rank = 0; rank < world; ++rank) {
      auto sampler = EvaluationSampler::Create(size, {.num_replicas = world, .rank = rank});
      ASSERT_TRUE(sampler.ok()) << sampler.status();
      const Indices indices = sampler->Indices();
      ASSERT_EQ(indices.size(), sampler->num_samples());
      least = std::min(least, sampler->num_samples());
      most = std::max(most, sampler->num_samples());
      all.insert(all.end(), indices.begin(), indices.end());
    }
    // The ranks' indices, in rank order, are in the data set's order.
    ASSERT_EQ(all.size(), size);
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(all[i], i);
    ASSERT_LE(most - least, 1);
  });
}

TEST(EvaluationSamplerTest, RefusesWhatMakesNoSense) {
  EXPECT_FALSE(EvaluationSampler::Create(0, {}).ok());
  EXPECT_FALSE(EvaluationSampler::Create(5, {.num_replicas = 2, .rank = 2}).ok());
  EXPECT_FALSE(EvaluationSampler::Create(5, {.num_replicas = -1}).ok());
}

// FNV-1a over the numbers, one step each.
uint64_t Hash(const Indices& order) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i : order) hash = (hash ^ static_cast<uint64_t>(i)) * 0x100000001b3;
  return hash;
}

// Expected values: torch 2.11, torch.randperm(n, generator=torch.Generator().manual_seed(seed)).
TEST(RandomPermutationTest, EqualsTorchRandperm) {
  EXPECT_EQ(RandomPermutation(0, 0), Indices());
  EXPECT_EQ(RandomPermutation(1, 0), Indices({0}));
  EXPECT_EQ(RandomPermutation(10, 0), Indices({4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  EXPECT_EQ(RandomPermutation(10, 1), Indices({5, 6, 1, 2, 0, 8, 9, 3, 7, 4}));
  EXPECT_EQ(Hash(RandomPermutation(60000, 0)), 0x216d0369b8490487);
  EXPECT_EQ(Hash(RandomPermutation(60000, 7)), 0xaaf21e7fe715a71b);
}

TEST(RandomPermutationTest, SeedsBeyond32BitsAreTorchsToo) {
  EXPECT_EQ(RandomPermutation(10, (uint64_t{1} << 32) + 1), RandomPermutation(10, 1));
  EXPECT_EQ(RandomPermutation(10, 12345678901), Indices({6, 0, 5, 4, 2, 7, 8, 3, 9, 1}));
  EXPECT_EQ(RandomPermutation(10, static_cast<uint64_t>(-1)),
            Indices({1, 4, 6, 2, 0, 5, 8, 7, 9, 3}));
}

// torch uses this algorithm from 214,748,364 elements on; equality there was checked by hand.
// Expected values: the same loop in Python over draws of torch's generator.
TEST(RandomPermutationTest, LongPermutationDrawsAsTorchDoes) {
  EXPECT_EQ(internal::LongPermutation(10, 0), Indices({8, 2, 6, 3, 5, 1, 0, 9, 7, 4}));
  EXPECT_EQ(internal::LongPermutation(10, 1), Indices({8, 4, 2, 0, 7, 5, 3, 6, 9, 1}));
}

TEST(RandomPermutationTest, BothAlgorithmsPermute) {
  for (int64_t n = 0; n <= 50; ++n) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      for (Indices order :
           {internal::ShortPermutation(n, seed), internal::LongPermutation(n, seed)}) {
        std::sort(order.begin(), order.end());
        for (int64_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i) << n << " " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace ddp::data
