#include "tools/datasets/csv.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

class CsvTest : public testing::Test {
 protected:
  CsvTest()
      : folder_(absl::StrCat(testing::TempDir(), "/csv_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    Write("train.csv", "x,colour,target\n1,red,b\n3,blue,a\n,red,b\n");
    Write("test.csv", "target,colour,x\na,red,5\n");
  }

  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << text;
    return path;
  }
  absl::StatusOr<Splits> Load(const CsvOptions& own, DatasetOptions options = {}) {
    options.implementations.Mutable<CsvOptions>("csv") = own;
    return LoadCsv(options);
  }

  const std::string folder_;
};

TEST_F(CsvTest, BatchesAreRowsOfFeaturesAndClasses) {
  const auto splits =
      Load({.missing = CsvMissing::kNan, .normalise = false}, {.data_dir = folder_});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->input_shape, std::vector<int64_t>({3}));
  EXPECT_EQ(splits->num_classes, 2);
  EXPECT_EQ(splits->train->size(), 3);
  // x, then blue and red.
  const data::Batch batch = splits->train->Get({1, 0});
  EXPECT_TRUE(at::equal(batch.input, at::tensor({3.f, 1.f, 0.f, 1.f, 0.f, 1.f}).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({0, 1}, at::kLong)));
  EXPECT_TRUE(std::isnan(splits->train->Get({2}).input[0][0].item<float>()));
  const data::Batch test = splits->test->Get({0});
  EXPECT_TRUE(at::equal(test.input, at::tensor({5.f, 0.f, 1.f}).view({1, 3})));
  EXPECT_EQ(test.target[0].item<int64_t>(), 0);
  EXPECT_TRUE(absl::StrContains(splits->about, "train.csv: 3 rows, 1 values missing"))
      << splits->about;
}

TEST_F(CsvTest, SizesTakeTheFirstRows) {
  const auto splits = Load({.missing = CsvMissing::kMean}, {.data_dir = folder_, .train_size = 2});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->train->size(), 2);
}

// Above all another value of a category, which may give the features other places.
TEST_F(CsvTest, FingerprintsTellValuesAndRows) {
  const auto print = [&](const std::string& train) {
    Write("train.csv", train);
    const auto splits = Load({}, {.data_dir = folder_});
    EXPECT_TRUE(splits.ok()) << splits.status();
    return std::pair(splits->train->Fingerprint(), splits->test->Fingerprint());
  };
  const std::string text = "x,colour,target\n1,red,b\n3,blue,a\n5,red,b\n";
  const auto first = print(text);
  EXPECT_EQ(first.first.size(), 16);
  EXPECT_EQ(print(text), first);
  const auto green = print("x,colour,target\n1,red,b\n3,green,a\n5,red,b\n");
  EXPECT_NE(green.first, first.first);
  EXPECT_NE(green.second, first.second);
  EXPECT_NE(print("x,colour,target\n3,blue,a\n1,red,b\n5,red,b\n").first, first.first);
  EXPECT_NE(print("x,colour,target\n1,red,b\n3,blue,b\n5,red,a\n").first, first.first);
}

TEST_F(CsvTest, ErrorsNameTheOptionOrTheFile) {
  const auto expect = [&](const CsvOptions& own, const DatasetOptions& options,
                          const std::string& text) {
    const absl::Status status = Load(own, options).status();
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status;
  };
  const std::string train = folder_ + "/train.csv", test = folder_ + "/test.csv";
  expect({}, {}, "dataset.csv.train= must name the file");
  expect({.train = train, .test = "/no/such.csv"}, {}, "dataset.csv.test=/no/such.csv");
  expect({.train = train, .test = test}, {.data_dir = folder_}, "dataset.data_dir=");
  expect({}, {.data_dir = "/nowhere"}, "dataset.data_dir=/nowhere cannot be read");
  expect({}, {.data_dir = folder_}, "train.csv, line 4, column 'x'");
  expect({.missing = CsvMissing::kMean}, {.data_dir = folder_, .test_size = 2}, "test_size=2");
}

}  // namespace
}  // namespace ddp::tools::datasets
