#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/safetensors/tensor_file.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::safetensors {
namespace {

constexpr const char* kFiles[] = {"model.safetensors", "model.safetensors.index.json",
                                  "training_state"};

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/safetensors_", info->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }

  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }

  // Writes a checkpoint and returns its path.
  std::string Written(const State& state, absl::string_view name = "a.safetensors") {
    const absl::Status status = format_->Write(state, Path(name));
    EXPECT_TRUE(status.ok()) << status;
    return Path(name);
  }

  void ExpectError(const std::string& path, absl::StatusCode code, absl::string_view what) {
    const absl::Status status = format_->Read(path).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    EXPECT_EQ(format_->CheckComplete(path), status);
  }

  std::string directory_;
  std::unique_ptr<Format> format_ = CreateFormat("safetensors").value();
};

void Put(const std::string& path, absl::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

// The bytes of a file as another program writes it, without checksums.
std::string Foreign(std::vector<TensorEntry> tensors, const Metadata& metadata = {{"format", "pt"}},
                    char fill = 0) {
  std::string bytes = WriteHeader(tensors, metadata).value();
  return bytes + std::string(tensors.empty() ? 0 : tensors.back().end, fill);
}

c10::impl::GenericDict Model() {
  c10::impl::GenericDict model = NewTree();
  model.insert("fc.weight", at::arange(6, at::kFloat).reshape({2, 3}));
  model.insert("fc.bias", at::arange(2, at::kDouble));
  model.insert("norm.num_batches_tracked", at::scalar_tensor(7, at::kLong));
  return model;
}

State SmallState() {
  State state;
  state.root.insert("epoch", int64_t{3});
  state.root.insert("model", Model());
  c10::impl::GenericDict slots(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericDict slot = NewTree();
  slot.insert("exp_avg", at::arange(6, at::kFloat));
  slots.insert(int64_t{0}, slot);
  c10::impl::GenericDict optimizer = NewTree();
  optimizer.insert("state", slots);
  state.root.insert("optimizer", optimizer);
  return state;
}

std::vector<std::string> NamesIn(const std::string& path) {
  const absl::StatusOr<TensorFile> file = TensorFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  std::vector<std::string> names;
  for (const TensorEntry& tensor : file->tensors()) names.push_back(tensor.name);
  return names;
}

TEST_F(SafetensorsTest, OtherProgramsFindTheModel) {
  const std::string path = Written(SmallState());
  const std::vector<std::string> files(std::begin(kFiles), std::end(kFiles));
  EXPECT_EQ(ListDirectory(path).value(), files);
  const std::vector<std::string> names = {"norm.num_batches_tracked", "fc.bias", "fc.weight"};
  EXPECT_EQ(NamesIn(path + "/model.safetensors"), names);
  EXPECT_EQ(TensorFile::Open(path + "/model.safetensors")->metadata(),
            (Metadata{{"format", "pt"}, {"ddp.version", "1"}}));
  EXPECT_EQ(ReadFile(path + "/model.safetensors.index.json").value(),
            R"({
  "metadata": {
    "total_size": 48
  },
  "weight_map": {
    "fc.bias": "model.safetensors",
    "fc.weight": "model.safetensors",
    "norm.num_batches_tracked": "model.safetensors"
  }
}
)");
  EXPECT_EQ(NamesIn(path + "/training_state"),
            std::vector<std::string>{"optimizer.state.0.exp_avg"});
  const absl::StatusOr<State> read = format_->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(SmallState().root, read->root), "");
}

TEST_F(SafetensorsTest, TheModelsFileAloneGivesWeights) {
  const std::string path = Written(SmallState());
  State weights;
  weights.root.insert("model", Model());
  std::filesystem::copy(path + "/model.safetensors", Path("weights.st"));
  for (const std::string& file : {path + "/model.safetensors", Path("weights.st")}) {
    const absl::StatusOr<State> read = format_->Read(file);
    ASSERT_TRUE(read.ok()) << read.status();
    const c10::impl::GenericDict model = read->root.at("model").toGenericDict();
    EXPECT_EQ(read->root.size(), 1u);
    EXPECT_EQ(model.size(), 3u);
    for (const auto& entry : Model()) {
      EXPECT_EQ(Difference(entry.value(), model.at(entry.key())), "") << entry.key();
    }
    EXPECT_TRUE(format_->CheckComplete(file).ok());
  }
  ExpectError(path + "/training_state", absl::StatusCode::kDataLoss, "name its folder");
}

TEST_F(SafetensorsTest, TiedWeightsAreWrittenOnceUnderTheFirstName) {
  State state = SmallState();
  c10::impl::GenericDict model = Model();
  const at::Tensor shared = at::rand({300, 200});
  model.insert("head.weight", shared);
  model.insert("embed.weight", shared.view({300, 200}));
  model.insert("format", shared);  // a name that the metadata has already
  state.root.insert_or_assign("model", model);
  const std::string path = Written(state);
  EXPECT_EQ(NamesIn(path + "/model.safetensors").size(), 5u);
  EXPECT_EQ(TensorFile::Open(path + "/model.safetensors")->metadata(),
            (Metadata{{"format", "pt"}, {"ddp.version", "1"}, {"head.weight", "embed.weight"}}));
  for (const std::string& file : {path, path + "/model.safetensors"}) {
    State read = format_->Read(file).value();
    const c10::impl::GenericDict loaded = read.root.at("model").toGenericDict();
    EXPECT_EQ(loaded.size(), 6u);
    for (const char* name : {"head.weight", "embed.weight", "format"}) {
      EXPECT_TRUE(at::equal(loaded.at(name).toTensor(), shared)) << name;
    }
    EXPECT_TRUE(
        loaded.at("head.weight").toTensor().is_alias_of(loaded.at("embed.weight").toTensor()));
  }
}

TEST_F(SafetensorsTest, PartsOfAWeightAreWrittenOut) {
  State state;
  c10::impl::GenericDict model = NewTree();
  const at::Tensor qkv = at::rand({6, 4});
  model.insert("qkv", qkv);
  model.insert("q", qkv.narrow(0, 0, 2));
  model.insert("v", qkv.narrow(0, 4, 2));
  model.insert("flat", qkv.view({24}));
  state.root.insert("model", model);
  const std::string path = Written(state);
  const std::vector<std::string> names = {"flat", "q", "qkv", "v"};
  EXPECT_EQ(NamesIn(path + "/model.safetensors"), names);
  EXPECT_EQ(Difference(state.root, format_->Read(path)->root), "");
}

TEST_F(SafetensorsTest, TheSameTensorTwiceIsWrittenOnce) {
  State state;
  const at::Tensor whole = at::arange(24, at::kInt).reshape({4, 6});
  state.root.insert("inside", whole.narrow(0, 1, 2));
  state.root.insert("whole", whole);
  state.root.insert("again", whole.detach());
  state.root.insert("transposed", whole.t());
  state.root.insert("bytes", whole.view(at::kByte));
  const std::string path = Written(state);
  const std::vector<std::string> names = {"again", "inside", "transposed", "bytes"};
  EXPECT_EQ(NamesIn(path + "/training_state"), names);
  State read = format_->Read(path).value();
  EXPECT_EQ(Difference(state.root, read.root), "");
  EXPECT_TRUE(read.root.at("again").toTensor().is_alias_of(read.root.at("whole").toTensor()));
}

TEST_F(SafetensorsTest, TensorsAreWrittenRowMajor) {
  State state;
  c10::impl::GenericDict model = NewTree();
  const at::Tensor image = at::arange(2 * 3 * 4 * 5, at::kHalf).reshape({2, 3, 4, 5});
  model.insert("channels_last", image.contiguous(at::MemoryFormat::ChannelsLast));
  model.insert("transposed", at::arange(6).remainder(2).to(at::kBool).reshape({2, 3}).t());
  model.insert("conjugate", at::complex(at::ones({2}), at::arange(2, at::kFloat)).conj());
  model.insert("expanded", at::ones({1}).expand({3}));
  state.root.insert("model", model);
  const std::string path = Written(state);
  TensorFile file = TensorFile::Open(path + "/model.safetensors").value();
  const TensorEntry& entry = *file.Find("channels_last");
  std::string bytes(entry.size(), '\0');
  ASSERT_TRUE(file.Read(entry, 0, bytes.size(), bytes.data()).ok());
  EXPECT_EQ(std::memcmp(bytes.data(), image.const_data_ptr(), bytes.size()), 0);
  EXPECT_EQ(Difference(state.root, format_->Read(path)->root), "");
  const at::Tensor conjugate =
      format_->Read(path)->root.at("model").toGenericDict().at("conjugate").toTensor();
  EXPECT_FALSE(conjugate.is_conj());
  EXPECT_EQ(at::imag(conjugate)[1].item<float>(), -1.0f);
}

TEST_F(SafetensorsTest, EveryDtypeOfTheFormat) {
  State state;
  c10::impl::GenericDict model = NewTree();
  const at::Tensor bytes = at::arange(64, at::kByte);
  size_t types = 0;
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    switch (dtype) {
      case at::kFloat8_e8m0fnu:
      case at::kFloat8_e4m3fnuz:
      case at::kFloat8_e5m2fnuz:
      case at::kFloat8_e4m3fn:
      case at::kFloat8_e5m2:
      case at::kFloat4_e2m1fn_x2:
      case at::kBool:
      case at::kByte:
      case at::kChar:
      case at::kShort:
      case at::kInt:
      case at::kLong:
      case at::kUInt16:
      case at::kUInt32:
      case at::kUInt64:
      case at::kHalf:
      case at::kBFloat16:
      case at::kFloat:
      case at::kDouble:
      case at::kComplexFloat:
        model.insert(c10::toString(dtype),
                     (dtype == at::kBool ? bytes.bitwise_and(1) : bytes).view(dtype));
        ++types;
        break;
      default:
        break;
    }
  }
  EXPECT_EQ(types, DtypeNames().size() - 2);  // torch has no F6
  state.root.insert("model", model);
  const std::string path = Written(state);
  const absl::StatusOr<State> read = format_->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
  // Two numbers of four bits are one element in torch.
  EXPECT_EQ(TensorFile::Open(path + "/model.safetensors")->Find("Float4_e2m1fn_x2")->shape,
            std::vector<int64_t>{128});
}

TEST_F(SafetensorsTest, WhatTheFormatLacksIsRefusedByName) {
  const auto refused = [&](const at::Tensor& tensor, absl::string_view what) {
    State state = SmallState();
    state.root.at("model").toGenericDict().insert("bad", tensor);
    const absl::Status status = format_->Write(state, Path("bad.safetensors"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "'model/bad'")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_FALSE(std::filesystem::exists(Path("bad.safetensors")));
  };
  refused(at::ones({2}, at::kComplexDouble), "element type ComplexDouble");
  refused(at::ones({2}, at::kComplexHalf), "element type ComplexHalf");
  refused(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8), "dense tensors");
  refused(at::scalar_tensor(1, at::kByte).view(at::kFloat4_e2m1fn_x2), "without a dimension");
}

TEST_F(SafetensorsTest, NamesThatMeet) {
  State state;
  c10::impl::GenericDict a = NewTree(), b = NewTree(), model = NewTree();
  a.insert("b.c", at::zeros({1}));
  b.insert("c", at::ones({1}));
  state.root.insert("a", a);
  state.root.insert("a.b", b);
  state.root.insert("a.b.c#2", at::full({1}, 2));
  state.root.insert("__metadata__", at::full({1}, 3));
  model.insert("__metadata__", at::full({1}, 4));
  model.insert("", at::full({1}, 5));
  model.insert("enc/kernel", at::full({1}, 8));
  model.insert("enc.kernel", at::full({1}, 9));
  model.insert("enc", a);
  state.root.insert("model", model);
  state.root.insert("model.x", at::full({1}, 6));
  const std::string path = Written(state);
  // Those of other programs, with slashes, are theirs.
  std::vector<std::string> names = NamesIn(path + "/model.safetensors");
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"", "__metadata__#2", "enc.b.c", "enc.kernel",
                                             "enc/kernel"}));
  EXPECT_EQ(Difference(state.root, format_->Read(path)->root), "");
  State only;
  only.root.insert("model", at::full({2}, 7));  // no dict
  EXPECT_EQ(Difference(only.root, format_->Read(Written(only, "b.safetensors"))->root), "");
  EXPECT_EQ(NamesIn(Path("b.safetensors/model.safetensors")), std::vector<std::string>{"model"});
}

TEST_F(SafetensorsTest, FloatsKeepTheirType) {
  State state;
  for (double number :
       {0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, -1e-7, std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity(), 9007199254740993.0}) {
    state.root.insert(absl::StrCat("f", number), number);
  }
  state.root.insert("text", "Infinity");
  const State read = format_->Read(Written(state)).value();
  EXPECT_EQ(Difference(state.root, read.root), "");
  EXPECT_TRUE(std::signbit(read.root.at("f-0").toDouble()));
  State nan;
  nan.root.insert("nan", std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(std::isnan(format_->Read(Written(nan, "b.safetensors"))->root.at("nan").toDouble()));
}

TEST_F(SafetensorsTest, FilesOfOthersAreUnverified) {
  const std::string bytes = Foreign({{.name = "y", .dtype = Dtype::kF32, .shape = {2, 2}},
                                     {.name = "x", .dtype = Dtype::kU8, .shape = {3}}},
                                    {{"format", "pt"}, {"tied", "y"}, {"license", "none"}});
  Put(Path("x.safetensors"), bytes);
  ASSERT_TRUE(MakeDirectories(Path("folder")).ok());
  Put(Path("folder/model.safetensors"), bytes);
  Put(Path("folder/config.json"), "{}");
  const auto strict = CreateFormat("safetensors", {.accept_unverified = false}).value();
  for (const std::string& path : {Path("x.safetensors"), Path("folder")}) {
    testing::internal::CaptureStderr();
    const absl::StatusOr<State> read = format_->Read(path);
    EXPECT_TRUE(absl::StrContains(testing::internal::GetCapturedStderr(), "unverified"));
    ASSERT_TRUE(read.ok()) << read.status();
    const c10::impl::GenericDict model = read->root.at("model").toGenericDict();
    EXPECT_EQ(model.size(), 3u);
    EXPECT_EQ(model.at("x").toTensor().sizes(), at::IntArrayRef({3}));
    EXPECT_TRUE(model.at("tied").toTensor().is_same(model.at("y").toTensor()));
    EXPECT_TRUE(format_->CheckComplete(path).ok());
    for (const absl::Status& status : {strict->Read(path).status(), strict->CheckComplete(path)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "unverified")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    }
  }
  const std::string own = Written(SmallState());
  testing::internal::CaptureStderr();
  EXPECT_TRUE(strict->Read(own).ok());
  EXPECT_TRUE(strict->CheckComplete(own).ok());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(SafetensorsTest, ModelsInSeveralFiles) {
  const std::string folder = Path("llm");
  ASSERT_TRUE(MakeDirectories(folder).ok());
  Put(folder + "/model-00001-of-00002.safetensors",
      Foreign({{.name = "a", .dtype = Dtype::kU8, .shape = {3}}}, {}, 1));
  Put(folder + "/model-00002-of-00002.safetensors",
      Foreign({{.name = "b", .dtype = Dtype::kU8, .shape = {3}}}, {}, 2));
  const auto index = [&](absl::string_view weight_map) {
    Put(folder + "/model.safetensors.index.json",
        absl::StrCat(R"({"metadata":{"total_size":6},"weight_map":)", weight_map, "}"));
  };
  index(R"({"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"})");
  const absl::StatusOr<State> read = format_->Read(folder);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->root.at("model").toGenericDict().at("b").toTensor()[2].item<int>(), 2);
  const State part = format_->Read(folder, {.parts = {{"model/b", FlatRange{1, 3}}}}).value();
  EXPECT_EQ(part.sharded.at("model/b").parts[0].tensor.numel(), 2);

  const auto refused = [&](absl::string_view weight_map, absl::string_view what) {
    index(weight_map);
    ExpectError(folder, absl::StatusCode::kDataLoss, what);
  };
  std::filesystem::create_directories(Path("elsewhere"));
  std::filesystem::copy(folder + "/model-00001-of-00002.safetensors",
                        Path("elsewhere/x.safetensors"));
  refused(R"({"a":"../elsewhere/x.safetensors"})", "names no file of this folder for 'a'");
  refused(absl::StrCat(R"({"a":")", Path("elsewhere/x.safetensors"), R"("})"), "names no file");
  refused(R"({"a":"training.bin"})", "names no file");
  refused(R"({"a":1})", "names no file");
  refused(R"({"a":"model-00001-of-00002.safetensors\u0000.safetensors"})", "names no file");
  refused(absl::StrCat(R"({"a":")", std::string(300, 'a'), R"(.safetensors"})"), "names no file");
  refused(R"({"a":"model-00003-of-00003.safetensors"})", "lacks its file model-00003");
  refused(R"({"a":"model-00002-of-00002.safetensors"})", "which lacks it");
  refused(R"({"c":"model-00002-of-00002.safetensors"})", "names tensor 'c'");
  refused("[]", "has no weight_map");
  refused(R"({"a":"model-00001-of-00002.safetensors","a":"x"})", "key \"a\" twice");
  refused(std::string(100000, '['), "nested");
  Put(folder + "/model-00002-of-00002.safetensors",
      Foreign({{.name = "a", .dtype = Dtype::kU8, .shape = {3}}}));
  refused(R"({"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"})",
          "tensor 'a' in two files");
  std::filesystem::remove(folder + "/model.safetensors.index.json");
  ExpectError(folder, absl::StatusCode::kDataLoss, "tensor 'a' in two files");
  for (const char* file :
       {"/model-00001-of-00002.safetensors", "/model-00002-of-00002.safetensors"}) {
    std::filesystem::remove(folder + file);
  }
  ExpectError(folder, absl::StatusCode::kDataLoss, "is a folder without model.safetensors");
}

// As where only files of this suffix were downloaded.
TEST_F(SafetensorsTest, SeveralFilesWithoutTheirIndex) {
  const std::string folder = Path("llm");
  ASSERT_TRUE(MakeDirectories(folder).ok());
  const auto put = [&](int number, const char* tensor) {
    Put(absl::StrCat(folder, "/model-0000", number, "-of-00002.safetensors"),
        Foreign({{.name = tensor, .dtype = Dtype::kU8, .shape = {3}}}, {},
                static_cast<char>(number)));
  };
  put(1, "a");
  const FormatEntry entry = FormatRegistry::Find("safetensors").value();
  EXPECT_TRUE(entry.recognises(folder));
  ExpectError(folder, absl::StatusCode::kDataLoss,
              "lacks 1 of the 2 files of its model: model-00002-of-00002.safetensors");
  put(2, "b");
  const absl::StatusOr<State> read = format_->Read(folder);
  ASSERT_TRUE(read.ok()) << read.status();
  const c10::impl::GenericDict model = read->root.at("model").toGenericDict();
  ASSERT_EQ(model.size(), 2u);
  EXPECT_EQ(model.at("a").toTensor()[2].item<int>(), 1);
  EXPECT_EQ(model.at("b").toTensor()[2].item<int>(), 2);
  EXPECT_TRUE(format_->CheckComplete(folder).ok());

  // One of them alone says so.
  const std::string part = folder + "/model-00001-of-00002.safetensors";
  testing::internal::CaptureStderr();
  EXPECT_TRUE(format_->Read(part).ok());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, absl::StrCat(part, " is part 1 of 2"))) << log;
  EXPECT_TRUE(absl::StrContains(log, absl::StrCat("name the folder, ", folder))) << log;
  testing::internal::CaptureStderr();
  EXPECT_TRUE(format_->Read(folder).ok());
  const std::string of_all = testing::internal::GetCapturedStderr();
  EXPECT_FALSE(absl::StrContains(of_all, "is part")) << of_all;

  Put(folder + "/other-00001-of-00001.safetensors",
      Foreign({{.name = "c", .dtype = Dtype::kU8, .shape = {3}}}));
  ExpectError(folder, absl::StatusCode::kFailedPrecondition, "of more than one model");
}

TEST_F(SafetensorsTest, TypesThatTorchLacksAreNamed) {
  Put(Path("x.safetensors"), Foreign({{.name = "six", .dtype = Dtype::kF6E2M3, .shape = {4}},
                                      {.name = "x", .dtype = Dtype::kU8, .shape = {1}}}));
  ExpectError(Path("x.safetensors"), absl::StatusCode::kUnimplemented,
              "tensor 'six' has element type F6_E2M3, which LibTorch lacks");
  EXPECT_TRUE(format_->Read(Path("x.safetensors"), {.parts = {{"model/x", Whole{}}}}).ok());
  std::vector<std::string> left_out;
  const absl::StatusOr<State> read = format_->Read(Path("x.safetensors"), {.left_out = &left_out});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->root.at("model").toGenericDict().size(), 1u);
  EXPECT_EQ(left_out,
            std::vector<std::string>{"'model/six' has element type F6_E2M3, which LibTorch lacks"});
  Put(Path("x.safetensors"), Foreign({{.name = "four", .dtype = Dtype::kF4, .shape = {2, 3}}}));
  ExpectError(Path("x.safetensors"), absl::StatusCode::kDataLoss, "last size is odd");
}

TEST_F(SafetensorsTest, ANewerVersionIsNotDamage) {
  std::vector<TensorEntry> tensors;
  const auto give = [](const TensorEntry&) -> absl::StatusOr<const void*> { return nullptr; };
  ASSERT_TRUE(WriteTensorFile(Path("x.safetensors"), tensors, {{"ddp.version", "2"}}, give).ok());
  ExpectError(Path("x.safetensors"), absl::StatusCode::kFailedPrecondition, "has version '2'");
}

TEST_F(SafetensorsTest, EveryByteOfEachFileCounts) {
  const State state = SmallState();
  const std::string path = Written(state);
  for (const char* name : kFiles) {
    const std::string file = absl::StrCat(path, "/", name);
    const std::string whole = ReadFile(file).value();
    const auto expect_damage = [&](const std::string& what) {
      const absl::Status status = format_->Read(path).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << what << ": " << status;
      ASSERT_TRUE(absl::StrContains(status.message(), path)) << status;
      const absl::Status complete = format_->CheckComplete(path);
      ASSERT_TRUE(complete.ok() || complete == status) << what << ": " << complete;
    };
    for (size_t at = 0; at < whole.size(); ++at) {
      for (int mask : {0x20, 0xff}) {
        std::string flipped = whole;
        flipped[at] = static_cast<char>(flipped[at] ^ mask);
        Put(file, flipped);
        expect_damage(absl::StrCat(name, " byte ", at));
      }
    }
    for (size_t size = 0; size < whole.size(); ++size) {
      Put(file, whole.substr(0, size));
      expect_damage(absl::StrCat(name, " cut at ", size));
      ASSERT_EQ(format_->CheckComplete(path).code(), absl::StatusCode::kDataLoss) << size;
      ASSERT_EQ(format_->Read(path, {.parts = {{"epoch", Whole{}}}}).status().code(),
                absl::StatusCode::kDataLoss)
          << size;
    }
    Put(file, whole + "x");
    expect_damage(absl::StrCat(name, " with one byte more"));
    std::filesystem::remove(file);
    expect_damage(absl::StrCat(name, " is missing"));
    ASSERT_EQ(format_->CheckComplete(path).code(), absl::StatusCode::kDataLoss);
    Put(file, whole);
    ASSERT_TRUE(format_->Read(path).ok());
  }
}

TEST_F(SafetensorsTest, FilesOfTwoCheckpointsDoNotMix) {
  const std::string a = Written(SmallState());
  State other = SmallState();
  other.root.at("model").toGenericDict().at("fc.weight").toTensor()[0][0] = 9;
  const std::string b = Written(other, "b.safetensors");
  std::filesystem::copy(b + "/model.safetensors", a + "/model.safetensors",
                        std::filesystem::copy_options::overwrite_existing);
  ExpectError(a, absl::StatusCode::kDataLoss, "not the one that was saved with training_state");
}

// A folder whose checksums fit, and whose tree is `tree`.
void PutTree(const std::string& path, const std::string& tree) {
  std::filesystem::remove_all(path);
  ASSERT_TRUE(MakeDirectories(path).ok());
  const std::string zeros(64, '\0');
  const auto give = [&](const TensorEntry&) -> absl::StatusOr<const void*> { return zeros.data(); };
  std::vector<TensorEntry> none;
  const auto digest =
      WriteTensorFile(path + "/model.safetensors", none, {{"ddp.version", "1"}}, give);
  ASSERT_TRUE(digest.ok());
  Put(path + "/model.safetensors.index.json",
      "{\n  \"metadata\": {\n    \"total_size\": 0\n  },\n  \"weight_map\": {}\n}\n");
  std::vector<TensorEntry> tensors = {{.name = "t", .dtype = Dtype::kU8, .shape = {4, 4}}};
  ASSERT_TRUE(WriteTensorFile(
                  path + "/training_state", tensors,
                  {{"ddp.version", "1"}, {"ddp.model_xxh3", *digest}, {"ddp.state", tree}}, give)
                  .ok());
}

TEST_F(SafetensorsTest, HostileValuesAreRefused) {
  const std::string path = Path("a.safetensors");
  const auto dict = [](absl::string_view value) {
    return absl::StrCat(R"({"dict":[["x",)", value, "]]}");
  };
  PutTree(path, dict(R"({"tensor":"training_state/t"})"));
  ASSERT_TRUE(format_->Read(path).ok()) << format_->Read(path).status();
  const auto refused = [&](const std::string& tree) {
    PutTree(path, tree);
    ExpectError(path, absl::StatusCode::kDataLoss, "a.safetensors");
    EXPECT_EQ(format_->Read(path, {.parts = {{"x", Whole{}}}}).ok(), false) << tree;
  };
  for (const char* tree :
       {"", "[]", "1", "{}", "{\"dict\":1}", "{\"dict\":[1]}", "{\"dict\":[[\"x\"]]}",
        "{\"dict\":[[\"x\",1,2]]}", "{\"dict\":[[1.5,1]]}", "{\"dict\":[[null,1]]}",
        "{\"dict\":[[18446744073709551615,1]]}", "{\"dict\":[[\"x\",1]]",
        "{\"dict\":[],\"dict\":[]}"}) {
    refused(tree);
  }
  for (const char* value :
       {R"({"tensor":"none"})", R"({"tensor":"t"})", R"({"tensor":"model.safetensors/t"})",
        R"({"tensor":"training_state/"})", R"({"tensor":"training_state/../t"})", R"({"tensor":1})",
        R"({"what":1})", "{}", "[]", R"({"tuple":1})", R"({"float":"1"})",
        R"({"tensor":"training_state/t","more":1})", "18446744073709551615"}) {
    refused(dict(value));
  }
  std::string deep = "1";
  for (int i = 0; i < 101; ++i) deep = R"({"list":[)" + deep + "]}";
  refused(dict(deep));
  refused(dict(std::string(1'000'000, '[')));
}

TEST_F(SafetensorsTest, GoldenFile) {
  State state = SmallState();
  state.root.insert("tuple", c10::ivalue::Tuple::create({c10::IValue(0.5), c10::IValue("é\n")}));
  const absl::StatusOr<std::string> golden =
      Runfile("libtorch_ddp/checkpoint/safetensors/testdata/epoch_2.safetensors/training_state");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const std::string folder = DirectoryOf(*golden);
  const std::string path = Written(state);
  for (const char* name : kFiles) {
    EXPECT_EQ(ReadFile(absl::StrCat(path, "/", name)).value(),
              ReadFile(absl::StrCat(folder, "/", name)).value())
        << name;
  }
  EXPECT_EQ(Difference(state.root, format_->Read(folder)->root), "");
}

}  // namespace
}  // namespace ddp::checkpoint::safetensors
