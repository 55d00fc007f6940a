#include "tools/datasets/byte_images.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

TEST(ByteImagesTest, GathersAndNormalises) {
  const std::vector<uint8_t> pixels = {0, 255, 51, 102, 255, 0};
  const ByteImages images(
      {.shape = {1, 2}, .pixels = pixels, .labels = {7, 8, 255}, .mean = 0.2f, .std = 0.4f});
  ASSERT_EQ(images.size(), 3);
  const data::Batch batch = images.Get({1, 0, 1});
  ASSERT_EQ(batch.input.sizes(), at::IntArrayRef({3, 1, 2}));
  ASSERT_EQ(batch.input.scalar_type(), at::kFloat);
  ASSERT_EQ(batch.target.sizes(), at::IntArrayRef({3}));
  ASSERT_EQ(batch.target.scalar_type(), at::kLong);
  const float expected[] = {0, 0.5, -0.5, 2, 0, 0.5};
  for (int i = 0; i < 6; ++i) {
    EXPECT_FLOAT_EQ(batch.input.const_data_ptr<float>()[i], expected[i]) << i;
  }
  const int64_t labels[] = {8, 7, 8};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(batch.target.const_data_ptr<int64_t>()[i], labels[i]);
  EXPECT_EQ(images.Get({2}).target.const_data_ptr<int64_t>()[0], 255);
}

TEST(ByteImagesTest, TheFingerprintIsOfPixelsAndLabels) {
  // So large that not all of it is read.
  std::vector<uint8_t> pixels(1 << 20);
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<uint8_t>(i % 251);
  std::vector<uint8_t> labels(1 << 10, 3);
  const auto print = [&](const std::vector<int64_t>& shape) {
    return ByteImages({.shape = shape, .pixels = pixels, .labels = labels}).Fingerprint();
  };
  const std::string first = print({32, 32});
  EXPECT_EQ(first.size(), 16);
  EXPECT_EQ(print({32, 32}), first);
  EXPECT_NE(print({1, 1024}), first);
  for (const auto place : {pixels.begin(), pixels.end() - 1, labels.begin() + 500}) {
    const uint8_t before = std::exchange(*place, uint8_t{7});
    EXPECT_NE(print({32, 32}), first);
    *place = before;
  }
  std::reverse(pixels.begin(), pixels.end());
  EXPECT_NE(print({32, 32}), first);
}

TEST(ByteImagesTest, NoIndicesGiveAnEmptyBatch) {
  const std::vector<uint8_t> pixels = {1, 2};
  const ByteImages images({.shape = {2}, .pixels = pixels, .labels = {0}});
  EXPECT_EQ(images.Get({}).input.sizes(), at::IntArrayRef({0, 2}));
}

TEST(ByteImagesDeathTest, PixelsMustMatchLabels) {
  const std::vector<uint8_t> pixels = {1, 2, 3};
  EXPECT_DEATH(ByteImages({.shape = {2}, .pixels = pixels, .labels = {0}}), "3 vs. 2");
}

}  // namespace
}  // namespace ddp::tools::datasets
