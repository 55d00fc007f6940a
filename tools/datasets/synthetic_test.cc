#include "tools/datasets/synthetic.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {

// docs/data.md shows the next lines (//tests/readme_example:pages_test compares them).

// tools/datasets/rings.cc
absl::StatusOr<Splits> LoadRings(const DatasetOptions& options) { return MakeSynthetic(options); }

namespace {
const Registration<DatasetRegistry> kRings("rings", DatasetEntry{.load = &LoadRings});
}  // namespace

namespace {

TEST(DatasetRegistrationTest, MakesTheNameOneOfTheDataSets) {
  const auto splits = Load({.name = "rings", .train_size = 7});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->train->size(), 7);
}

std::vector<float> Input(const data::Batch& batch) {
  const float* values = batch.input.const_data_ptr<float>();
  return {values, values + batch.input.numel()};
}

std::vector<int64_t> Target(const data::Batch& batch) {
  const int64_t* values = batch.target.const_data_ptr<int64_t>();
  return {values, values + batch.target.numel()};
}

data::Batch All(const data::Dataset& dataset) {
  std::vector<int64_t> indices(dataset.size());
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return dataset.Get(indices);
}

TEST(SyntheticTest, HasTheWantedForm) {
  auto splits = MakeSynthetic({.train_size = 7, .test_size = 5, .input_shape = {3, 4}});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->train->size(), 7);
  EXPECT_EQ(splits->test->size(), 5);
  EXPECT_EQ(splits->num_classes, 10);
  EXPECT_EQ(splits->input_shape, std::vector<int64_t>({3, 4}));
  EXPECT_EQ(All(*splits->train).input.sizes(), at::IntArrayRef({7, 3, 4}));
  EXPECT_EQ(MakeSynthetic({})->train->Get({0}).input.sizes(), at::IntArrayRef({1, 1, 28, 28}));
}

TEST(SyntheticTest, AnExampleIsAFunctionOfSeedSplitAndIndex) {
  auto splits = MakeSynthetic({.seed = 3});
  const auto expected = Input(splits->train->Get({41}));
  EXPECT_EQ(Input(splits->train->Get({41})), expected);
  auto pair = Input(splits->train->Get({7, 41}));
  EXPECT_EQ(std::vector<float>(pair.begin() + 784, pair.end()), expected);
  // The number of examples does not matter to any of them.
  EXPECT_EQ(Input(MakeSynthetic({.train_size = 1'000'000'000'000, .seed = 3})->train->Get({41})),
            expected);
  EXPECT_NE(Input(splits->train->Get({42})), expected);
  EXPECT_NE(Input(splits->test->Get({41})), expected);
  EXPECT_NE(Input(MakeSynthetic({.seed = 4})->train->Get({41})), expected);
}

TEST(SyntheticTest, ClassesAreBalancedAndNoiseIsCentred) {
  auto splits = MakeSynthetic({.train_size = 10'000, .input_shape = {16}, .num_classes = 4});
  const data::Batch all = All(*splits->train);
  std::vector<int> count(4);
  for (int64_t label : Target(all)) ++count.at(label);
  for (int n : count) EXPECT_NEAR(n, 2500, 200);
  const auto values = Input(all);
  double sum = 0;
  for (float value : values) {
    ASSERT_LE(std::abs(value), 4.0f);
    sum += value;
  }
  EXPECT_NEAR(sum / values.size(), 0, 0.2);
}

// Nearest class mean, of means learnt from the training split: what any model can do.
TEST(SyntheticTest, ItCanBeLearntButNotFromOnePixel) {
  auto splits = MakeSynthetic({.train_size = 2000, .test_size = 500});
  std::vector<std::vector<double>> mean(10, std::vector<double>(784));
  std::vector<int> count(10);
  const data::Batch train = All(*splits->train);
  const auto train_input = Input(train);
  const auto train_target = Target(train);
  for (size_t n = 0; n < train_target.size(); ++n) {
    ++count[train_target[n]];
    for (int i = 0; i < 784; ++i) mean[train_target[n]][i] += train_input[n * 784 + i];
  }
  const data::Batch test = All(*splits->test);
  const auto input = Input(test);
  const auto target = Target(test);
  int right = 0;
  int right_by_one_pixel = 0;
  for (size_t n = 0; n < target.size(); ++n) {
    std::vector<double> distance(10), first_pixel(10);
    for (int c = 0; c < 10; ++c) {
      for (int i = 0; i < 784; ++i) {
        const double d = input[n * 784 + i] - mean[c][i] / count[c];
        distance[c] += d * d;
        if (i == 0) first_pixel[c] = d * d;
      }
    }
    const auto nearest = [](const std::vector<double>& d) {
      return std::min_element(d.begin(), d.end()) - d.begin();
    };
    right += nearest(distance) == target[n];
    right_by_one_pixel += nearest(first_pixel) == target[n];
  }
  EXPECT_GT(right, 490);
  EXPECT_LT(right_by_one_pixel, 150);
}

// The examples are stable between versions and machines. Expected values: the same formulas in
// numpy.
TEST(SyntheticTest, ValuesArePinned) {
  const data::Batch batch = MakeSynthetic({.seed = 1, .input_shape = {2}})->train->Get({0, 1});
  EXPECT_EQ(Target(batch), std::vector<int64_t>({2, 8}));
  EXPECT_EQ(Input(batch), std::vector<float>({1.38535416f, 3.20248461f, 1.12127519f, 1.36022699f}));
}

TEST(SyntheticTest, OptionsAreChecked) {
  EXPECT_EQ(MakeSynthetic({.data_dir = "x"}).status().message(),
            "dataset.data_dir=x has no effect: data set synthetic reads no files");
  EXPECT_EQ(MakeSynthetic({.train_size = -1}).status().message(),
            "dataset synthetic: train_size is -1; it must be at least 1");
  EXPECT_FALSE(MakeSynthetic({.test_size = -1}).ok());
  EXPECT_FALSE(MakeSynthetic({.num_classes = 0}).ok());
  EXPECT_FALSE(MakeSynthetic({.input_shape = {1, 0}}).ok());
}

}  // namespace
}  // namespace ddp::tools::datasets
