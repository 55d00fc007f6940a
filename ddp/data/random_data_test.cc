#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/data/augment.h"
#include "ddp/data/concat.h"
#include "ddp/data/for_evaluation.h"
#include "ddp/data/loader.h"
#include "ddp/data/random_tensors.h"
#include "ddp/data/sampler.h"
#include "ddp/data/stream.h"
#include "ddp/data/subset.h"
#include "gtest/gtest.h"

namespace ddp::data {
namespace {

// Image i has the pixels 100 i, 100 i + 1, …
class Images : public Dataset {
 public:
  explicit Images(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  Batch Get(absl::Span<const int64_t> indices) const override {
    const at::Tensor index =
        at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kFloat);
    return {index.view({-1, 1, 1, 1}) * 100 + at::arange(1, 25, at::kFloat).view({1, 2, 3, 4}),
            index.to(at::kLong)};
  }

 private:
  int64_t n_;
};

// Draws as many numbers as the example says, and gives the last.
class Drawing : public RandomExampleDatasetOf<std::pair<int64_t, double>> {
 public:
  int64_t size() const override { return 100; }
  std::pair<int64_t, double> Get(int64_t index, Random& random) const override {
    double last = 0;
    for (int64_t i = 0; i <= index % 5; ++i) last = random.Uniform();
    return {index, last};
  }
};

std::shared_ptr<const AnyDataset> Augmented(int64_t n) {
  return AugmentedDataset::Create(std::make_shared<Images>(n), {.padding = 2}).value();
}

// Input and target of an example, by its position in the epoch.
using Read = std::map<int64_t, std::string>;

std::string Bytes(const at::Tensor& tensor) {
  const at::Tensor all = tensor.contiguous();
  return std::string(static_cast<const char*>(all.const_data_ptr()), all.nbytes());
}

// What `world` ranks read from `start` on, in at most `batches` batches of 4 each.
void ReadFrom(const AnyDataset& dataset, const SharedSampler& sampler, int64_t epoch, int world,
              int workers, int64_t start, int64_t batches, Read& read) {
  for (int rank = 0; rank < world; ++rank) {
    auto share =
        DistributedSampler::Create(sampler, {.num_replicas = world, .rank = rank, .seed = 7})
            .value();
    share.set_epoch(epoch);
    auto loader = Loader::Create(dataset, {.batch_size = 4, .num_workers = workers}).value();
    const Share mine = share.ShareFrom(start);
    ASSERT_TRUE(loader->Begin(mine).ok());
    int64_t i = 0;
    for (int64_t b = 0; b < batches; ++b) {
      auto batch = loader->Next();
      ASSERT_TRUE(batch.ok()) << batch.status();
      if (!*batch) break;
      for (int64_t row = 0; row < (*batch)->input.size(0); ++row, ++i) {
        if (mine.Position(i) >= sampler->size()) continue;  // padding
        const bool is_new = read.emplace(mine.Position(i),
                                         Bytes((*batch)->input[row]) + Bytes((*batch)->target[row]))
                                .second;
        ASSERT_TRUE(is_new) << "position " << mine.Position(i) << " was read twice";
      }
    }
  }
}

// The bits do not depend on workers, ranks and stops: a run stops at every possible place of a
// world of 4, goes on with 2, then with 3.
void ExpectSameBits(const AnyDataset& dataset, const SharedSampler& sampler) {
  Read whole;
  ReadFrom(dataset, sampler, /*epoch=*/1, /*world=*/1, /*workers=*/0, 0, 1000, whole);
  ASSERT_EQ(whole.size(), sampler->size());
  for (const int workers : {0, 1, 4}) {
    for (int64_t stop = 0; stop < 3; ++stop) {
      Read parts;
      ReadFrom(dataset, sampler, 1, 4, workers, 0, stop, parts);
      ReadFrom(dataset, sampler, 1, 2, workers, 16 * stop, 2, parts);
      ReadFrom(dataset, sampler, 1, 3, workers, 16 * stop + 16, 1000, parts);
      EXPECT_EQ(parts, whole) << workers << " workers, stopped after " << stop;
    }
  }
  Read other;
  ReadFrom(dataset, sampler, /*epoch=*/2, 1, 0, 0, 1000, other);
  EXPECT_NE(other, whole);
}

TEST(AugmentedDatasetTest, BitsAreThoseOfThePlace) {
  ExpectSameBits(*Augmented(75), RandomSampler(75, 7).value());
  ExpectSameBits(*Augmented(75), WeightedRandomSampler(std::vector<double>(75, 1), {}).value());
}

TEST(AugmentedDatasetTest, IsEvaluatedWithoutTransforms) {
  const auto images = std::make_shared<Images>(3);
  const auto augmented = AugmentedDataset::Create(images, {.padding = 2}).value();
  EXPECT_EQ(&augmented->for_evaluation(), images.get());
}

TEST(AugmentedDatasetTest, IsEvaluatedWithoutThoseBelowItEither) {
  const auto images = std::make_shared<Images>(3);
  const auto moved = AugmentedDataset::Create(images, {.padding = 2}).value();
  const auto both = AugmentedDataset::Create(moved, {.transforms = {"normalise"}}).value();
  EXPECT_EQ(&both->for_evaluation(), images.get());
}

TEST(AugmentedDatasetTest, TheSameExampleDiffersFromEpochToEpoch) {
  Read first, second;
  const auto sampler = SequentialSampler(40).value();
  ReadFrom(*Augmented(40), sampler, 0, 1, 1, 0, 1000, first);
  ReadFrom(*Augmented(40), sampler, 1, 1, 1, 0, 1000, second);
  int equal = 0;
  for (const auto& [position, bytes] : first) equal += second[position] == bytes;
  EXPECT_LT(equal, 10);
}

TEST(RandomExampleDatasetTest, EachExampleHasItsOwnNumbers) {
  const Drawing drawing;
  const auto loader = AnyLoader::Create(drawing, {.batch_size = 10, .num_workers = 3}).value();
  ASSERT_TRUE(loader
                  ->Begin({.size = 30,
                           .first = 5,
                           .stride = 2,
                           .order = SequentialSampler(100).value()->OrderOf(0),
                           .positions = 100,
                           .seed = 3,
                           .epoch = 4})
                  .ok());
  for (int64_t b = 0; b < 3; ++b) {
    auto batch = loader->Next();
    ASSERT_TRUE(batch.ok()) << batch.status();
    auto& [indices, last] = (*batch)->Get<std::pair<at::Tensor, at::Tensor>>();
    for (int64_t row = 0; row < 10; ++row) {
      const int64_t position = 5 + 2 * (10 * b + row);
      Random random(3, 4, position);
      double expected = 0;
      for (int64_t i = 0; i <= position % 5; ++i) expected = random.Uniform();
      EXPECT_EQ(indices[row].item<int64_t>(), position);
      EXPECT_EQ(last[row].item<double>(), expected);
    }
  }
  EXPECT_THROW(drawing.GetAny(std::vector<int64_t>{1}), c10::Error);
}

// Also an example that an epoch has several times: they are those of its places.
TEST(RandomExampleDatasetTest, TheSameExampleDiffersFromPlaceToPlace) {
  const Drawing drawing;
  const auto loader = AnyLoader::Create(drawing, {.batch_size = 10}).value();
  const Share share = {.size = 10,
                       .order = [](int64_t) { return int64_t{5}; },
                       .positions = 10,
                       .seed = 3,
                       .epoch = 4};
  ASSERT_TRUE(loader->Begin(share).ok());
  auto batch = loader->Next();
  ASSERT_TRUE(batch.ok()) << batch.status();
  auto& [indices, last] = (*batch)->Get<std::pair<at::Tensor, at::Tensor>>();
  for (int64_t row = 0; row < 10; ++row) {
    EXPECT_EQ(indices[row].item<int64_t>(), 5);
    EXPECT_EQ(last[row].item<double>(), Random(3, 4, row).Uniform()) << row;
  }
}

TEST(RandomTensorsTest, AreOfTheRandom) {
  Random one(1, 2, 3), two(1, 2, 3);
  EXPECT_TRUE(Rand({5, 2}, one).equal(Rand({5, 2}, two)));
  EXPECT_EQ(Randn({3}, one).dtype(), at::kFloat);
  EXPECT_NE(one(), two());
}

// Every crop and flip, by the definition: a window of the padded image, mirrored.
TEST(AugmentTest, CropAndFlipAreWindows) {
  const Images images(1);
  const at::Tensor image = images.Get({0}).input;  // [1, 2, 3, 4]
  const int64_t padding = 2;
  at::Tensor padded = at::zeros({1, 2, 3 + 4, 4 + 4});
  padded.narrow(2, padding, 3).narrow(3, padding, 4).copy_(image);
  std::set<std::string> windows;
  for (int64_t y = 0; y <= 2 * padding; ++y) {
    for (int64_t x = 0; x <= 2 * padding; ++x) {
      const at::Tensor window = padded.narrow(2, y, 3).narrow(3, x, 4);
      windows.insert(Bytes(window));
      windows.insert(Bytes(window.flip(3)));
    }
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kByte, at::kHalf}) {
    std::set<std::string> seen;
    for (int64_t position = 0; position < 2000; ++position) {
      Random random(1, 0, position);
      const at::Tensor made =
          Augment(image.to(dtype), {.padding = padding}, absl::MakeSpan(&random, 1));
      EXPECT_EQ(made.scalar_type(), dtype);
      const std::string bytes = Bytes(made.to(at::kFloat));
      ASSERT_TRUE(windows.contains(bytes)) << made;
      seen.insert(bytes);
    }
    EXPECT_EQ(seen, windows);
  }
}

TEST(AugmentTest, HalfOfTheImagesAreFlipped) {
  const at::Tensor image = Images(1).Get({0}).input;
  int flipped = 0;
  for (int64_t position = 0; position < 2000; ++position) {
    Random random(1, 0, position);
    const at::Tensor made = Augment(image, {.transforms = {"flip"}}, absl::MakeSpan(&random, 1));
    flipped += made.equal(image.flip(3));
  }
  EXPECT_NEAR(flipped, 1000, 150);
}

TEST(AugmentTest, APaddingLargerThanTheImage) {
  const at::Tensor image = Images(1).Get({0}).input;
  bool has_image = false, has_nothing = false;
  for (int64_t position = 0; position < 3000; ++position) {
    Random random(1, 0, position);
    const at::Tensor made = Augment(image, {.padding = 9}, absl::MakeSpan(&random, 1));
    has_image = has_image || made.equal(image) || made.flip(3).equal(image);
    has_nothing = has_nothing || made.equal(at::zeros_like(image));
  }
  EXPECT_TRUE(has_image && has_nothing);
}

TEST(AugmentTest, Normalises) {
  const at::Tensor bytes = at::full({1, 2, 1, 1}, 51, at::kByte);
  Random random(1, 0, 0);
  const at::Tensor made = Augment(
      bytes, {.transforms = {"normalise"}, .mean = {0.1f, 0.6f}, .std = {0.5f, 2}}, {&random, 1});
  EXPECT_NEAR(made[0][0].item<float>(), 0.2, 1e-6);
  EXPECT_NEAR(made[0][1].item<float>(), -0.2, 1e-6);
  const at::Tensor floats = Augment(
      at::ones({1, 2, 2}), {.transforms = {"normalise"}, .mean = {3}, .std = {2}}, {&random, 1});
  EXPECT_TRUE(floats.equal(at::full({1, 2, 2}, -1.0f)));
}

TEST(AugmentTest, OptionsAreChecked) {
  const auto message = [](const AugmentOptions& options) {
    return std::string(
        AugmentedDataset::Create(std::make_shared<Images>(1), options).status().message());
  };
  EXPECT_EQ(message({.transforms = {"crop", "rotate"}}),
            "there is no transform 'rotate' of images: use crop, flip or normalise");
  EXPECT_EQ(message({.transforms = {"flip", "flip"}}),
            "the transform 'flip' of images stands there twice");
  EXPECT_EQ(message({.padding = -1}), "augment option padding is -1; it must be at least 0");
  EXPECT_TRUE(absl::StrContains(message({.std = {0}}), "mean and std"));
}

// Shards of words "s:o", with counters of what is read.
class Words : public StreamOf<std::string> {
 public:
  Words(std::vector<int64_t> sizes, bool can_seek) : sizes_(std::move(sizes)), seeks_(can_seek) {}

  int64_t num_shards() const override { return static_cast<int64_t>(sizes_.size()); }
  int64_t shard_size(int64_t shard) const override { return sizes_[shard]; }
  bool can_seek() const override { return seeks_; }
  std::unique_ptr<ShardReaderOf<std::string>> Open(int64_t shard, int64_t offset) const override {
    EXPECT_TRUE(seeks_ || offset == 0);
    ++opened;
    struct Reader : ShardReaderOf<std::string> {
      std::string Next() override {
        EXPECT_LT(offset, words->sizes_[shard]);
        ++words->read;
        if (shard == words->bad_shard && offset == words->bad_offset) {
          throw std::runtime_error("damaged record");
        }
        return absl::StrCat(shard, ":", offset++);
      }
      const Words* words;
      int64_t shard, offset;
    };
    auto reader = std::make_unique<Reader>();
    reader->words = this;
    reader->shard = shard;
    reader->offset = offset;
    return reader;
  }

  mutable std::atomic<int64_t> opened = 0, read = 0;
  int64_t bad_shard = -1, bad_offset = -1;

 private:
  const std::vector<int64_t> sizes_;
  const bool seeks_;
};

std::vector<std::string> ReadWords(const Words& words, Share share, int workers) {
  auto loader =
      LoaderOf<std::vector<std::string>>::Create(words, {.batch_size = 5, .num_workers = workers})
          .value();
  EXPECT_TRUE(loader->Begin(std::move(share)).ok());
  std::vector<std::string> all;
  while (true) {
    auto batch = loader->Next();
    EXPECT_TRUE(batch.ok()) << batch.status();
    if (!batch.ok() || !*batch) return all;
    all.insert(all.end(), (**batch).begin(), (**batch).end());
  }
}

TEST(StreamTest, TheOrderIsThatOfTheSamplerForAnyReader) {
  for (const bool can_seek : {true, false}) {
    const Words words({30, 0, 7, 50, 13}, can_seek);
    EXPECT_EQ(words.size(), 100);
    EXPECT_EQ(words.random_access(), can_seek);
    const auto sampler = words.MakeSampler({.buffer_size = 12, .seed = 2}).value();
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<std::string> expected;
      const Order order = sampler->OrderOf(epoch);
      for (int64_t p = 0; p < 100; ++p) {
        const int64_t i = order(p);
        expected.push_back(i < 30   ? absl::StrCat("0:", i)
                           : i < 37 ? absl::StrCat("2:", i - 30)
                           : i < 87 ? absl::StrCat("3:", i - 37)
                                    : absl::StrCat("4:", i - 87));
      }
      for (const int workers : {0, 1, 4}) {
        for (const int64_t start : {0, 33}) {
          for (const int world : {1, 3}) {
            std::map<int64_t, std::string> got;
            for (int rank = 0; rank < world; ++rank) {
              auto share = DistributedSampler::Create(
                               sampler, {.num_replicas = world, .rank = rank, .pad = false})
                               .value();
              share.set_epoch(epoch);
              const Share mine = share.ShareFrom(start);
              const auto all = ReadWords(words, mine, workers);
              for (size_t i = 0; i < all.size(); ++i) {
                got[mine.Position(static_cast<int64_t>(i))] = all[i];
              }
            }
            ASSERT_EQ(got.size(), 100 - start);
            for (const auto& [p, word] : got) ASSERT_EQ(word, expected[p]) << p;
          }
        }
      }
    }
  }
}

// One that cannot seek reads each shard once, though the buffer takes its examples in another
// order.
TEST(StreamTest, WithoutSeeksEachShardIsReadOnce) {
  const Words words({40, 40, 40}, /*can_seek=*/false);
  const auto sampler = words.MakeSampler({.buffer_size = 20}).value();
  auto share = DistributedSampler::Create(sampler, {.num_replicas = 2, .rank = 1}).value();
  EXPECT_EQ(ReadWords(words, share.ShareFrom(0), 4).size(), 60);
  EXPECT_EQ(words.opened, 3);
  EXPECT_LE(words.read, 120);
}

// Also if the buffer is larger than what is kept otherwise.
TEST(StreamTest, WithoutSeeksAsManyAreKeptAsTheBufferHas) {
  class Forgetful final : public Words {
   public:
    using Words::Words;
    int64_t kept_examples() const override { return 2; }
  };
  const Forgetful words({40, 40, 40}, /*can_seek=*/false);
  const auto sampler = words.MakeSampler({.buffer_size = 20}).value();
  const auto share = DistributedSampler::Create(sampler, {}).value();
  EXPECT_EQ(ReadWords(words, share.ShareFrom(0), 1).size(), 120);
  EXPECT_EQ(words.opened, 3);
  EXPECT_EQ(words.read, 120);
}

// Also if the buffer has examples of more shards than there are open readers.
TEST(StreamTest, WithoutSeeksManySmallShardsAreReadOnce) {
  std::vector<int64_t> sizes(300, 10);
  sizes[150] = 400;
  const Words words(sizes, /*can_seek=*/false);
  const auto sampler = words.MakeSampler({.buffer_size = 1500}).value();
  const auto share = DistributedSampler::Create(sampler, {}).value();
  EXPECT_EQ(ReadWords(words, share.ShareFrom(0), 4).size(), 3390);
  EXPECT_EQ(words.opened, 300);
  EXPECT_EQ(words.read, 3390);
}

// Numbers in shards of 10, 15, 20 and 25, under noise of their places.
class NoisyNumbers : public RandomStreamOf<int64_t, std::pair<at::Tensor, int64_t>, Batch> {
 public:
  explicit NoisyNumbers(bool can_seek) : seeks_(can_seek) {}
  int64_t num_shards() const override { return 4; }
  int64_t shard_size(int64_t shard) const override { return 10 + 5 * shard; }
  bool can_seek() const override { return seeks_; }
  std::unique_ptr<ShardReaderOf<int64_t>> Open(int64_t shard, int64_t offset) const override {
    struct Reader : ShardReaderOf<int64_t> {
      int64_t Next() override { return next++; }
      int64_t next = 0;
    };
    auto reader = std::make_unique<Reader>();
    reader->next = 100 * shard + offset;
    return reader;
  }
  std::pair<at::Tensor, int64_t> Decode(int64_t number, Random& random) const override {
    return {Randn({3}, random) + number, number};
  }
  Batch Collate(std::vector<std::pair<at::Tensor, int64_t>> examples,
                absl::Span<const int64_t> indices) const override {
    auto [input, target] = data::Collate(std::move(examples), indices);
    return {input, target};
  }

 private:
  const bool seeks_;
};

TEST(StreamTest, RandomNumbersAreThoseOfThePlace) {
  for (const bool can_seek : {true, false}) {
    const NoisyNumbers numbers(can_seek);
    const auto sampler = numbers.MakeSampler({.buffer_size = 12, .seed = 2}).value();
    ExpectSameBits(numbers, sampler);
    // Also those of an example that an epoch has twice.
    std::vector<Random> random = {Random(7, 1, 4), Random(7, 1, 5)};
    AnyBatch twice = numbers.GetAny(std::vector<int64_t>{11, 11}, absl::MakeSpan(random));
    const at::Tensor input = twice.Get<Batch>().input;
    Random first(7, 1, 4), second(7, 1, 5);
    EXPECT_TRUE(input[0].equal(Randn({3}, first) + 101));
    EXPECT_TRUE(input[1].equal(Randn({3}, second) + 101));
    EXPECT_THROW(numbers.GetAny(std::vector<int64_t>{1}), c10::Error);
  }
}

// Writes into its records.
class AddsInPlace : public RandomStreamOf<at::Tensor, std::pair<at::Tensor, int64_t>, Batch> {
 public:
  int64_t num_shards() const override { return 1; }
  int64_t shard_size(int64_t) const override { return 20; }
  bool can_seek() const override { return false; }
  std::unique_ptr<ShardReaderOf<at::Tensor>> Open(int64_t, int64_t) const override {
    struct Reader : ShardReaderOf<at::Tensor> {
      at::Tensor Next() override { return at::full({1}, next++); }
      int64_t next = 0;
    };
    return std::make_unique<Reader>();
  }
  std::pair<at::Tensor, int64_t> Decode(at::Tensor record, Random&) const override {
    return {record.add_(100), 0};
  }
  Batch Collate(std::vector<std::pair<at::Tensor, int64_t>> examples,
                absl::Span<const int64_t> indices) const override {
    auto [input, target] = data::Collate(std::move(examples), indices);
    return {input, target};
  }
};

TEST(StreamTest, WhatIsKeptIsAsItWasRead) {
  const AddsInPlace stream;
  const std::vector<int64_t> backwards = {7, 3, 5};
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<Random> random = {Random(1, epoch, 0), Random(1, epoch, 1), Random(1, epoch, 2)};
    AnyBatch batch = stream.GetAny(backwards, absl::MakeSpan(random));
    const at::Tensor input = batch.Get<Batch>().input.flatten();
    EXPECT_TRUE(input.equal(at::tensor({107, 103, 105}, at::kLong))) << input;
  }
}

// Going on from the middle opens no shard that has been read.
TEST(StreamTest, AResumeOpensOnlyWhatIsLeft) {
  const Words words({40, 40, 40}, /*can_seek=*/true);
  const auto sampler = words.MakeSampler({.shuffle = false}).value();
  const auto share = DistributedSampler::Create(sampler, {}).value();
  const auto all = ReadWords(words, share.ShareFrom(85), 1);
  ASSERT_EQ(all.size(), 35);
  EXPECT_EQ(all[0], "2:5");
  EXPECT_EQ(words.opened, 1);
  EXPECT_EQ(words.read, 35);
}

TEST(StreamTest, AnErrorNamesTheExample) {
  Words words({10, 10}, /*can_seek=*/true);
  words.bad_shard = 1;
  words.bad_offset = 3;
  auto loader = LoaderOf<std::vector<std::string>>::Create(words, {.batch_size = 5}).value();
  std::vector<int64_t> indices(20);
  for (int64_t i = 0; i < 20; ++i) indices[i] = i;
  ASSERT_TRUE(loader->Begin(ShareOf(indices)).ok());
  absl::Status status;
  while (status.ok()) status = loader->Next().status();
  EXPECT_EQ(status.message(),
            "loading batch 3 of 4, example 13 at position 13 of the epoch: damaged record");
}

// As another rank's example, which stands between two of this rank's.
TEST(StreamTest, ADamagedRecordThatIsNotAskedForIsNoError) {
  Words words({10, 10}, /*can_seek=*/true);
  words.bad_shard = 1;
  words.bad_offset = 3;
  auto loader = LoaderOf<std::vector<std::string>>::Create(words, {.batch_size = 2}).value();
  ASSERT_TRUE(loader->Begin(ShareOf({12, 14, 16, 11})).ok());
  for (const std::vector<std::string>& expected :
       {std::vector<std::string>{"1:2", "1:4"}, {"1:6", "1:1"}}) {
    const auto batch = loader->Next();
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(**batch, expected);
  }
  Words unseekable({10, 10}, /*can_seek=*/false);
  unseekable.bad_shard = 1;
  unseekable.bad_offset = 3;
  auto reads_on = LoaderOf<std::vector<std::string>>::Create(unseekable, {.batch_size = 2}).value();
  ASSERT_TRUE(reads_on->Begin(ShareOf({12, 14})).ok());
  EXPECT_TRUE(absl::StrContains(reads_on->Next().status().message(),
                                "example 13, which is read before, in shard 1 of a stream that "
                                "cannot seek: damaged record"));
}

TEST(ConcatDatasetTest, MixesAugmentedSourcesByWeights) {
  const auto both = ConcatDataset::Create({Augmented(20), std::make_shared<Images>(100)}).value();
  EXPECT_EQ(both->size(), 120);
  const auto mixture = MixtureSampler({{.sampler = RandomSampler(20, 1).value(), .weight = 2},
                                       {.sampler = RandomSampler(100, 2).value(), .weight = 1}},
                                      {.num_samples = 75, .seed = 3})
                           .value();
  ExpectSameBits(*both, mixture);
  // Rows are where they were asked for.
  std::vector<Random> random(3, Random(1, 0, 0));
  const Batch batch = both->Get({25, 3, 119}, absl::MakeSpan(random));
  EXPECT_EQ(batch.target.sum().item<int64_t>(), 5 + 3 + 99);
  EXPECT_EQ(batch.target[0].item<int64_t>(), 5);
  EXPECT_EQ(batch.input[2][0][0][0].item<float>(), 9901);
  // Numbers that a part has drawn are not drawn again, as by an AugmentedDataset of both.
  const uint32_t next = Random(1, 0, 0)();
  EXPECT_EQ(random[0](), next);
  EXPECT_NE(random[1](), next);
  random[0] = Random(1, 0, 0);
  both->Get({7}, absl::MakeSpan(random).first(1));
  EXPECT_NE(random[0](), next);
  EXPECT_FALSE(ConcatDataset::Create({}).ok());
  EXPECT_FALSE(ConcatDataset::Create({nullptr}).ok());
}

TEST(ConcatDatasetTest, IsEvaluatedWithoutTheTransformsOfItsParts) {
  const Images images(20);
  const auto both = ConcatDataset::Create({std::make_shared<Images>(7), Augmented(20)}).value();
  const AnyDataset& evaluated = ForEvaluation(*both);
  std::vector<Random> random(3, Random(1, 0, 0));
  AnyBatch batch = evaluated.GetAny(std::vector<int64_t>{9, 3, 26}, absl::MakeSpan(random));
  EXPECT_TRUE(batch.Get<Batch>().input.equal(images.Get({2, 3, 19}).input));
  EXPECT_EQ(evaluated.size(), 27);
  const auto plain = ConcatDataset::Create({std::make_shared<Images>(7)}).value();
  EXPECT_EQ(&ForEvaluation(*plain), plain.get());
}

class Unlabelled : public Images {
 public:
  using Images::Images;
  Batch Get(absl::Span<const int64_t> indices) const override {
    return {Images::Get(indices).input, {}};
  }
};

// They were dropped in silence where the first example of a batch had none.
TEST(ConcatDatasetTest, TargetsOfSomePartsAloneAreRefused) {
  const auto both =
      ConcatDataset::Create({std::make_shared<Unlabelled>(5), std::make_shared<Images>(5)}).value();
  std::vector<Random> random(2, Random(1, 0, 0));
  for (const auto& [indices, message] :
       {std::pair(std::vector<int64_t>{4, 7},
                  "is undefined in example 4, but defined in example 7"),
        std::pair(std::vector<int64_t>{8, 1},
                  "is defined in example 8, but undefined in example 1")}) {
    try {
      both->Get(indices, absl::MakeSpan(random));
      ADD_FAILURE() << message;
    } catch (const c10::Error& error) {
      EXPECT_TRUE(absl::StrContains(error.what(), message)) << error.what();
    }
  }
  EXPECT_FALSE(both->Get({0, 1}, absl::MakeSpan(random)).target.defined());
  EXPECT_TRUE(both->Get({5, 9}, absl::MakeSpan(random)).target.defined());
}

class Printed : public Images {
 public:
  Printed(int64_t n, std::string fingerprint) : Images(n), fingerprint_(std::move(fingerprint)) {}
  std::string Fingerprint() const override { return fingerprint_; }

 private:
  const std::string fingerprint_;
};

TEST(FingerprintTest, IsOfTheExamplesAndTheirOrder) {
  const auto one = std::make_shared<Printed>(20, "one"), two = std::make_shared<Printed>(20, "two");
  const auto unknown = std::make_shared<Images>(20);
  const auto of = [](const ConcatDataset::Parts& parts) {
    return ConcatDataset::Create(parts).value()->Fingerprint();
  };
  EXPECT_EQ(of({one, two}), of({one, two}));
  EXPECT_EQ(std::set<std::string>(
                {of({one, two}), of({two, one}), of({one, one}), of({one, unknown}), of({one})})
                .size(),
            5);
  EXPECT_EQ(of({unknown, unknown}), "");
  EXPECT_EQ(Subset(*one, {1, 2}).Fingerprint(), Subset(*one, {1, 2}).Fingerprint());
  EXPECT_NE(Subset(*one, {1, 2}).Fingerprint(), Subset(*one, {2, 1}).Fingerprint());
  EXPECT_NE(Subset(*one, {1, 2}).Fingerprint(), Subset(*two, {1, 2}).Fingerprint());
  EXPECT_EQ(Subset(*unknown, {1, 2}).Fingerprint(), "");
  EXPECT_EQ(AugmentedDataset::Create(one, {}).value()->Fingerprint(), "one");
}

TEST(SubsetTest, IsEvaluatedAsTheWholeIs) {
  const Images images(20);
  const auto augmented = Augmented(20);
  const Subset some(*augmented, {4, 19});
  AnyBatch batch = ForEvaluation(some).GetAny(std::vector<int64_t>{1, 0}, {});
  EXPECT_TRUE(batch.Get<Batch>().input.equal(images.Get({19, 4}).input));
  const Subset plain(images, {4, 19});
  EXPECT_EQ(&ForEvaluation(plain), &plain);
}

// What docs/data.md shows (//tests/readme_example:pages_test compares it).

struct Rank {
  int rank = 0, world_size = 1;
};

absl::StatusOr<int64_t> CountExamples(const Dataset& train, const Rank& rank, int epochs) {
  int64_t examples = 0;
  DDP_ASSIGN_OR_RETURN(
      auto sampler,
      DistributedSampler::Create(train.size(),
                                 {.num_replicas = rank.world_size, .rank = rank.rank, .seed = 1}));
  DDP_ASSIGN_OR_RETURN(auto loader, Loader::Create(train, {.batch_size = 64}));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    DDP_RETURN_IF_ERROR(loader->Begin(sampler.ShareFrom(0)));
    while (true) {
      DDP_ASSIGN_OR_RETURN(std::optional<Batch> batch, loader->Next());
      if (!batch) break;
      examples += batch->input.size(0);  // batch->input, batch->target
    }
  }
  return examples;
}

TEST(PageTest, ALoopReadsEachEpoch) {
  EXPECT_EQ(CountExamples(Images(10), {.rank = 1, .world_size = 3}, 2).value(), 2 * 4);
}

class Shaken : public ddp::data::RandomDatasetOf<ddp::data::Batch> {
 public:
  explicit Shaken(at::Tensor images) : images_(std::move(images)) {}
  int64_t size() const override { return images_.size(0); }
  ddp::data::Batch Get(absl::Span<const int64_t> indices,
                       absl::Span<ddp::data::Random> random) const override {
    std::vector<at::Tensor> shaken;
    for (size_t i = 0; i < indices.size(); ++i) {  // random[i] is of indices[i]
      const at::Tensor noise = ddp::data::Randn(images_.sizes().slice(1), random[i]);
      shaken.push_back(images_[indices[i]] + noise);
    }
    return {at::stack(shaken), {}};
  }

 private:
  const at::Tensor images_;  // [n, …]
};

TEST(PageTest, NoiseDoesNotDependOnWorkers) {
  const Shaken shaken(at::zeros({6, 2, 3}));
  const auto read = [&](int workers) {
    auto loader = Loader::Create(shaken, std::vector<int64_t>{0, 1, 2, 3, 4, 5},
                                 {.batch_size = 6, .num_workers = workers})
                      .value();
    return loader->Next().value()->input;
  };
  EXPECT_TRUE(read(0).equal(read(3)));
  EXPECT_FALSE(read(0)[0].equal(read(0)[1]));
}

struct Lines : ddp::data::StreamOf<std::string> {
  int64_t num_shards() const override;
  int64_t shard_size(int64_t shard) const override;  // count them once, if the format does not say
  std::unique_ptr<ddp::data::ShardReaderOf<std::string>> Open(int64_t shard,
                                                              int64_t offset) const override;
};

int64_t Lines::num_shards() const { return 2; }
int64_t Lines::shard_size(int64_t shard) const { return 1 + shard; }
std::unique_ptr<ShardReaderOf<std::string>> Lines::Open(int64_t shard, int64_t offset) const {
  struct Reader : ShardReaderOf<std::string> {
    std::string Next() override { return absl::StrCat("line ", offset++, " of ", shard); }
    int64_t shard = 0, offset = 0;
  };
  auto reader = std::make_unique<Reader>();
  reader->shard = shard;
  reader->offset = offset;
  return reader;
}

TEST(PageTest, LinesAreRead) {
  Lines lines;
  AnyBatch batch = lines.GetAny(std::vector<int64_t>{2, 0, 1});
  EXPECT_EQ(batch.Get<std::vector<std::string>>(),
            std::vector<std::string>({"line 1 of 1", "line 0 of 0", "line 0 of 1"}));
}

}  // namespace
}  // namespace ddp::data
