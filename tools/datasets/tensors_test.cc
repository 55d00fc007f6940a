#include "tools/datasets/tensors.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/safetensors/header.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

namespace format = checkpoint::safetensors;

class TensorsTest : public testing::Test {
 protected:
  TensorsTest()
      : folder_(absl::StrCat(testing::TempDir(), "/tensors_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  // Tensors of dtypes F32, U8 and I64.
  void Write(const std::string& name, const std::map<std::string, at::Tensor>& tensors) {
    std::vector<format::TensorEntry> entries;
    for (const auto& [key, tensor] : tensors) {
      entries.push_back({.name = key,
                         .dtype = tensor.scalar_type() == at::kFloat  ? format::Dtype::kF32
                                  : tensor.scalar_type() == at::kByte ? format::Dtype::kU8
                                                                      : format::Dtype::kI64,
                         .shape = tensor.sizes().vec()});
    }
    format::SortForAlignment(entries);
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file << format::WriteHeader(entries, {}).value();
    for (const format::TensorEntry& entry : entries) {
      const at::Tensor tensor = tensors.at(entry.name).contiguous();
      file.write(static_cast<const char*>(tensor.const_data_ptr()),
                 static_cast<std::streamsize>(tensor.nbytes()));
    }
  }
  void WriteSplits() {
    Write("train-1.safetensors", {{"input", Inputs(0, 3)}, {"target", at::arange(3)}});
    Write("train-2.safetensors", {{"input", Inputs(3, 2)}, {"target", at::arange(3, 5)}});
    Write("test.safetensors", {{"input", Inputs(9, 1)}, {"target", at::full({1}, 7, at::kLong)}});
  }
  static at::Tensor Inputs(int64_t first, int64_t n) {
    return at::arange(first, first + n, at::kFloat).view({n, 1, 1}).expand({n, 2, 3});
  }

  void ExpectError(const std::string& text) {
    const absl::Status status = LoadTensors({.data_dir = folder_}).status();
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status;
  }

  const std::string folder_;
};

TEST_F(TensorsTest, FilesOfASplitFollowEachOther) {
  WriteSplits();
  const auto splits = LoadTensors({.data_dir = folder_});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->num_classes, 8);
  EXPECT_EQ(splits->input_shape, (std::vector<int64_t>{2, 3}));
  ASSERT_EQ(splits->train->size(), 5);
  EXPECT_EQ(splits->test->size(), 1);
  const data::Batch batch = splits->train->Get({4, 0, 2, 3});
  EXPECT_TRUE(batch.target.equal(at::tensor({4, 0, 2, 3}, at::kLong)));
  EXPECT_TRUE(batch.input.equal(
      batch.target.to(at::kFloat).view({4, 1, 1}).expand({4, 2, 3}).contiguous()));
  EXPECT_EQ(LoadTensors({.data_dir = folder_, .train_size = 4})->train->size(), 4);
}

TEST_F(TensorsTest, FingerprintsTellFilesOfTheSameSizes) {
  const auto print = [&] { return LoadTensors({.data_dir = folder_})->train->Fingerprint(); };
  WriteSplits();
  const std::string first = print();
  EXPECT_EQ(first.size(), 16);
  EXPECT_EQ(print(), first);
  EXPECT_NE(LoadTensors({.data_dir = folder_})->test->Fingerprint(), first);
  Write("train-1.safetensors", {{"input", Inputs(1, 3)}, {"target", at::arange(3)}});
  EXPECT_NE(print(), first);
  Write("train-1.safetensors", {{"input", Inputs(0, 3)}, {"target", at::arange(1, 4)}});
  EXPECT_NE(print(), first);
  WriteSplits();
  EXPECT_EQ(print(), first);
}

TEST_F(TensorsTest, BytesAreFractions) {
  for (const char* split : {"train", "test"}) {
    Write(absl::StrCat(split, ".safetensors"),
          {{"input", at::full({1, 2}, 51, at::kByte)}, {"target", at::full({1}, 1, at::kByte)}});
  }
  const auto splits = LoadTensors({.data_dir = folder_});
  ASSERT_TRUE(splits.ok()) << splits.status();
  const data::Batch batch = splits->test->Get({0});
  EXPECT_FLOAT_EQ(batch.input[0][1].item<float>(), 0.2f);
  EXPECT_EQ(batch.target.scalar_type(), at::kLong);
}

TEST_F(TensorsTest, ErrorsNameFileAndTensor) {
  ExpectError("has no file test*.safetensors");
  WriteSplits();
  EXPECT_TRUE(absl::StrContains(
      LoadTensors({.data_dir = folder_, .train_size = 6}).status().message(), "from 0 (all) to 5"));
  Write("train-2.safetensors", {{"input", Inputs(0, 2)}, {"label", at::arange(2)}});
  ExpectError("train-2.safetensors: there is no tensor 'target'");
  Write("train-2.safetensors", {{"input", Inputs(0, 2)}, {"target", at::arange(3)}});
  ExpectError("train-2.safetensors: the tensor 'target' is Long [n] with n = 3");
  Write("train-2.safetensors", {{"input", Inputs(0, 2)}, {"target", at::arange(-1, 1)}});
  ExpectError("has the class -1, below 0");
  Write("train-2.safetensors",
        {{"input", Inputs(0, 2)}, {"target", at::full({2}, int64_t{1} << 40, at::kLong)}});
  ExpectError("has the class 1099511627776 in the tensor 'target' of train-2.safetensors");
  Write("train-2.safetensors", {{"input", at::arange(2)}, {"target", at::arange(2)}});
  ExpectError("the tensor 'input' is Long [n]; it must be of floats or bytes");
  Write("train-2.safetensors",
        {{"input", Inputs(0, 2).narrow(1, 0, 1)}, {"target", at::arange(2)}});
  ExpectError("the tensor 'input' is Float [n, 1, 3], but Float [n, 2, 3] in");
  WriteSplits();
  std::filesystem::resize_file(folder_ + "/train-2.safetensors", 100);
  ExpectError("train-2.safetensors");
  EXPECT_TRUE(absl::StrContains(LoadTensors({}).status().message(), "data_dir"));
  EXPECT_TRUE(absl::StartsWith(LoadTensors({.data_dir = "/nowhere"}).status().message(),
                               "data_dir=/nowhere cannot be read"));
}

}  // namespace
}  // namespace ddp::tools::datasets
