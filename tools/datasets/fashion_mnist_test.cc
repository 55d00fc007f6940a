#include "tools/datasets/fashion_mnist.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

// The pixel sum of an image, recovered from its normalised floats.
int64_t PixelSum(const data::Batch& batch) {
  const float* values = batch.input.const_data_ptr<float>();
  return std::accumulate(values, values + batch.input.numel(), int64_t{0},
                         [](int64_t sum, float value) {
                           return sum + std::lround((value * 0.3530f + 0.2860f) * 255.0f);
                         });
}

int64_t Label(const data::Dataset& dataset, int64_t index) {
  return dataset.Get({index}).target.const_data_ptr<int64_t>()[0];
}

// Expected values: numpy, over the same files.
TEST(FashionMnistTest, ReadsTheRealData) {
  auto splits = LoadFashionMnist({});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->num_classes, 10);
  EXPECT_EQ(splits->input_shape, std::vector<int64_t>({1, 28, 28}));
  ASSERT_EQ(splits->train->size(), 60000);
  ASSERT_EQ(splits->test->size(), 10000);

  std::vector<int64_t> first(10);
  std::iota(first.begin(), first.end(), int64_t{0});
  const data::Batch batch = splits->train->Get(first);
  EXPECT_EQ(batch.input.sizes(), at::IntArrayRef({10, 1, 28, 28}));
  const int64_t* labels = batch.target.const_data_ptr<int64_t>();
  EXPECT_EQ(std::vector<int64_t>(labels, labels + 10),
            std::vector<int64_t>({9, 0, 0, 3, 0, 2, 7, 2, 5, 5}));

  EXPECT_EQ(PixelSum(splits->train->Get({0})), 76247);
  EXPECT_EQ(PixelSum(splits->train->Get({12345})), 97611);
  EXPECT_EQ(PixelSum(splits->test->Get({0})), 33456);
  EXPECT_EQ(PixelSum(splits->test->Get({9999})), 24390);
  EXPECT_EQ(Label(*splits->train, 59999), 5);
  EXPECT_EQ(Label(*splits->test, 9999), 5);
}

TEST(FashionMnistTest, TheFirstSoManyExamples) {
  auto splits = LoadFashionMnist({.train_size = 100, .test_size = 10});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->train->size(), 100);
  EXPECT_EQ(splits->test->size(), 10);
  EXPECT_EQ(PixelSum(splits->train->Get({0})), 76247);
  EXPECT_EQ(LoadFashionMnist({.train_size = 60001}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadFashionMnist({.test_size = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Sizes of the mappings of /proc/self/smaps whose first line has `text`, in KiB: Size, Anonymous.
// (Private_Dirty are also pages of a file that the kernel has not written to the disk yet.)
std::pair<int64_t, int64_t> Mapped(const std::string& text, int* mappings) {
  std::ifstream smaps("/proc/self/smaps");
  std::pair<int64_t, int64_t> sums;
  bool is_it = false;
  for (std::string line; std::getline(smaps, line);) {
    const bool is_field = absl::StrContains(line.substr(0, line.find(' ')), ":");
    if (!is_field) {
      is_it = absl::StrContains(line, text);
      *mappings += is_it;
    }
    const auto value = [&] { return std::stoll(line.substr(line.find(':') + 1)); };
    if (is_it && absl::StartsWith(line, "Size:")) sums.first += value();
    if (is_it && absl::StartsWith(line, "Anonymous:")) sums.second += value();
  }
  return sums;
}

// The kernel's copy, which all processes of a host share, and no other.
TEST(FashionMnistTest, TheImagesAreMapped) {
  const auto splits = LoadFashionMnist({});
  ASSERT_TRUE(splits.ok()) << splits.status();
  std::vector<int64_t> all(60000);
  std::iota(all.begin(), all.end(), int64_t{0});
  for (int64_t i = 0; i < 60000; i += 1000) {
    splits->train->Get(absl::MakeConstSpan(all).subspan(i, 1000));
  }
  int mappings = 0;
  const auto [size, copied] = Mapped("train-images-idx3-ubyte", &mappings);
  EXPECT_EQ(mappings, 1);
  EXPECT_GE(size, 60000 * 784 / 1024);
  EXPECT_EQ(copied, 0);
}

// A folder of small uncompressed files of the right form; tests break one thing.
class FashionMnistFilesTest : public testing::Test {
 protected:
  FashionMnistFilesTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(folder_);
    for (const char* prefix : {"train", "t10k"}) {
      WriteImages(prefix, 3, 28, 28);
      WriteLabels(prefix, {0, 9, 5});
    }
  }

  void WriteImages(const std::string& prefix, uint8_t n, uint8_t rows, uint8_t columns) {
    const uint8_t header[] = {0, 0, 8, 3, 0, 0, 0, n, 0, 0, 0, rows, 0, 0, 0, columns};
    std::ofstream file(absl::StrCat(folder_, "/", prefix, "-images-idx3-ubyte"));
    file.write(reinterpret_cast<const char*>(header), sizeof(header));
    for (int i = 0; i < n * rows * columns; ++i) file.put(static_cast<char>(i / (rows * columns)));
  }

  void WriteLabels(const std::string& prefix, const std::vector<uint8_t>& labels) {
    const uint8_t header[] = {0, 0, 8, 1, 0, 0, 0, static_cast<uint8_t>(labels.size())};
    std::ofstream file(absl::StrCat(folder_, "/", prefix, "-labels-idx1-ubyte"));
    file.write(reinterpret_cast<const char*>(header), sizeof(header));
    for (uint8_t label : labels) file.put(static_cast<char>(label));
  }

  void ExpectError(absl::StatusCode code, const std::string& message) {
    const absl::Status status = LoadFashionMnist({.data_dir = folder_}).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(status.message(), message);
  }

  const std::string folder_;
};

TEST_F(FashionMnistFilesTest, ReadsUncompressedFilesOfAnyNumberOfExamples) {
  auto splits = LoadFashionMnist({.data_dir = folder_});
  ASSERT_TRUE(splits.ok()) << splits.status();
  ASSERT_EQ(splits->train->size(), 3);
  EXPECT_EQ(PixelSum(splits->train->Get({2})), 2 * 784);
  EXPECT_EQ(Label(*splits->train, 1), 9);
}

TEST_F(FashionMnistFilesTest, MissingFile) {
  std::filesystem::remove(folder_ + "/train-labels-idx1-ubyte");
  ExpectError(absl::StatusCode::kNotFound,
              absl::StrCat("data_dir=", folder_,
                           " has neither train-labels-idx1-ubyte.gz nor train-labels-idx1-ubyte; "
                           "it must be the folder with fashion_mnist's four original files, or be "
                           "left out to use Bazel's"));
}

TEST_F(FashionMnistFilesTest, CountsMustAgree) {
  WriteLabels("train", {0, 1});
  ExpectError(absl::StatusCode::kDataLoss,
              absl::StrCat(folder_,
                           "/train-images-idx3-ubyte: holds 3x28x28 pixels, not 2x28x28 "
                           "as the 2 labels of ",
                           folder_, "/train-labels-idx1-ubyte demand"));
}

TEST_F(FashionMnistFilesTest, ImagesMustBe28By28) {
  WriteImages("t10k", 3, 28, 27);
  const absl::Status status = LoadFashionMnist({.data_dir = folder_}).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "holds 3x28x27 pixels, not 3x28x28")) << status;
}

TEST_F(FashionMnistFilesTest, LabelsMustBeClasses) {
  WriteLabels("train", {0, 9, 10});
  ExpectError(
      absl::StatusCode::kDataLoss,
      absl::StrCat(folder_, "/train-labels-idx1-ubyte: label 10 of example 2 is not in [0, 9]"));
}

TEST_F(FashionMnistFilesTest, DamageIsReportedWithThePath) {
  std::filesystem::resize_file(folder_ + "/t10k-images-idx3-ubyte", 1000);
  const absl::Status status = LoadFashionMnist({.data_dir = folder_}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), folder_ + "/t10k-images-idx3-ubyte: truncated"))
      << status;
}

}  // namespace
}  // namespace ddp::tools::datasets
