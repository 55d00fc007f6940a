// Requirements for every checkpoint format; runs for each linked format that can be written.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint {
namespace {

class ConformanceTest : public testing::TestWithParam<std::string> {
 protected:
  ConformanceTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = info->name();
    std::replace(name.begin(), name.end(), '/', '_');
    directory_ = absl::StrCat(testing::TempDir(), "/conformance_", name);
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    format_ = CreateFormat(GetParam()).value();
  }
  std::string Path(absl::string_view name) const {
    return absl::StrCat(directory_, "/", name, format_->suffix());
  }

  // As the manager calls Write: where all ranks write, into a new folder.
  absl::Status Write(Format& format, const State& state, const std::string& path) const {
    if (format.all_ranks_write()) std::filesystem::create_directories(path);
    return format.Write(state, path);
  }
  absl::Status Write(const State& state, const std::string& path) const {
    return Write(*format_, state, path);
  }

  // SampleState, without what the format lacks and says so.
  State Sample() const {
    State state = SampleState();
    if (GetParam() == "safetensors") {
      (void)state.root.at("tensors").toGenericDict().erase("ComplexDouble");
    }
    return state;
  }

  std::string directory_;
  std::unique_ptr<Format> format_;
};

// The files of a checkpoint: itself, or those in its folder.
std::vector<std::string> FilesOf(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::string> files = ListDirectory(path).value();
  for (std::string& file : files) file = absl::StrCat(path, "/", file);
  return files;
}

std::vector<std::string> ContentsOf(const std::string& path) {
  std::vector<std::string> contents;
  for (const std::string& file : FilesOf(path)) contents.push_back(ReadFile(file).value());
  return contents;
}

// Without the syncs of WriteFileAtomically, for the tests that write thousands of files.
void Put(const std::string& path, absl::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

State SmallState() {
  State state;
  state.root.insert("epoch", int64_t{3});
  state.root.insert("weight", at::arange(5, at::kFloat));
  return state;
}

TEST_P(ConformanceTest, NameAndSuffix) {
  EXPECT_EQ(format_->name(), GetParam());
  EXPECT_TRUE(absl::StartsWith(format_->suffix(), "."));
}

TEST_P(ConformanceTest, EveryValueComesBackBitForBit) {
  const State state = Sample();
  ASSERT_TRUE(Write(state, Path("a")).ok()) << Write(state, Path("b"));
  const absl::StatusOr<State> read = format_->Read(Path("a"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
  EXPECT_TRUE(read->sharded.empty());
}

TEST_P(ConformanceTest, EqualStatesMakeEqualFiles) {
  ASSERT_TRUE(Write(Sample(), Path("a")).ok());
  ASSERT_TRUE(Write(Sample(), Path("b")).ok());
  EXPECT_EQ(ContentsOf(Path("a")), ContentsOf(Path("b")));
}

TEST_P(ConformanceTest, ViewsOfOneStorageStayViewsAndAreWrittenOnce) {
  if (GetParam() != "pt") GTEST_SKIP() << GetParam() << " holds tensors, not storages";
  const at::Tensor whole = at::arange(100000, at::kFloat);
  State one, two;
  one.root.insert("whole", whole);
  two.root.insert("whole", whole);
  two.root.insert("half", whole.slice(0, 0, 50000));
  ASSERT_TRUE(Write(one, Path("one")).ok());
  ASSERT_TRUE(Write(two, Path("two")).ok());
  EXPECT_LT(std::filesystem::file_size(Path("two")),
            std::filesystem::file_size(Path("one")) + 1000);
  State read = format_->Read(Path("two")).value();
  EXPECT_TRUE(read.root.at("whole").toTensor().is_alias_of(read.root.at("half").toTensor()));
}

TEST_P(ConformanceTest, BytesSeenThroughTwoTypes) {
  const at::Tensor floats = at::arange(4, at::kFloat);
  State state;
  state.root.insert("floats", floats);
  state.root.insert("bytes", floats.view(at::kByte));
  state.root.insert("odd", at::arange(7, at::kByte).slice(0, 0, 4).view(at::kFloat));
  const absl::Status written = Write(state, Path("a"));
  ASSERT_TRUE(written.ok()) << written;
  const absl::StatusOr<State> read = format_->Read(Path("a"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
}

TEST_P(ConformanceTest, WhatCannotBeHeldIsRefusedByName) {
  const auto refused = [&](c10::IValue value, absl::string_view what) {
    State state;
    c10::impl::GenericDict inner = NewTree();
    inner.insert("inner", std::move(value));
    state.root.insert("outer", inner);
    const absl::Status status = Write(state, Path("a"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "outer/inner")) << status;
    if (format_->all_ranks_write()) {
      EXPECT_TRUE(FilesOf(Path("a")).empty()) << what;
    } else {
      EXPECT_FALSE(std::filesystem::exists(Path("a"))) << what;
    }
  };
  refused(at::eye(3).to_sparse(), "a sparse tensor");
  refused(at::empty({2}, at::TensorOptions().device(at::kMeta)), "a tensor without values");
  refused(at::Tensor(), "an undefined tensor");
  refused("\xff\xfe", "text that is not UTF-8");
  c10::impl::GenericDict by_complex(c10::ComplexType::get(), c10::AnyType::get());
  by_complex.insert(c10::complex<double>(1, 2), 1);
  refused(by_complex, "a dict with keys of another type");
  c10::impl::GenericList itself(c10::AnyType::get());
  itself.push_back(itself);
  refused(itself, "a list in itself");
  itself.clear();
}

// Values that some formats have: they come back, or are refused by name.
TEST_P(ConformanceTest, RareValuesAreHeldOrRefusedByName) {
  const auto try_one = [&](c10::IValue value, absl::string_view what) {
    SCOPED_TRACE(what);
    State state;
    c10::impl::GenericDict inner = NewTree();
    inner.insert("inner", std::move(value));
    state.root.insert("outer", inner);
    const std::string path = Path("rare");
    ASSERT_TRUE(RemoveTree(path).ok());
    const absl::Status status = Write(state, path);
    if (status.ok()) {
      const absl::StatusOr<State> read = format_->Read(path);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(Difference(state.root, read->root), "");
      return;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "outer/inner")) << status;
    if (format_->all_ranks_write()) {
      EXPECT_TRUE(FilesOf(path).empty());
    } else {
      EXPECT_FALSE(std::filesystem::exists(path));
    }
  };
  try_one(c10::complex<double>(1, -2), "a complex number");
  c10::impl::GenericDict by_double(c10::FloatType::get(), c10::AnyType::get());
  by_double.insert(0.5, 1);
  try_one(by_double, "a dict with keys of type double");
  c10::impl::GenericDict by_bool(c10::BoolType::get(), c10::AnyType::get());
  by_bool.insert(true, 1);
  try_one(by_bool, "a dict with keys of type bool");
  try_one("\xed\xb3\xbf", "text with a surrogate");
  for (const size_t bytes : {0, 4096, 4097, 200'000}) {
    c10::impl::GenericDict dict = NewTree();
    dict.insert(std::string(bytes, 'k'), at::arange(3));
    try_one(dict, absl::StrCat("a key of ", bytes, " bytes"));
  }
  c10::IValue nested = at::arange(3);
  for (int levels = 1; levels <= 110; ++levels) {
    c10::impl::GenericDict dict = NewTree();
    dict.insert("k", nested);
    nested = dict;
    if (levels % 30 == 0 || levels >= 94) try_one(nested, absl::StrCat(levels, " levels"));
  }
  const at::Tensor complex =
      at::arange(6, at::kFloat).to(at::kComplexFloat).mul(c10::complex<float>(1, 2));
  try_one(complex.conj(), "a lazy conjugate");
  try_one(complex.conj().slice(0, 1, 6, 2), "a strided lazy conjugate");
  try_one(at::imag(complex.conj()), "a lazy negative");
  for (c10::ScalarType dtype : {at::kComplexHalf, at::kFloat8_e8m0fnu, at::kBits8, at::kBits16}) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype)) * 3;
    const at::Tensor three = at::empty({0}, at::TensorOptions().dtype(dtype))
                                 .set_(at::arange(bytes, at::kByte).storage(), 0, {3}, {1});
    try_one(three, c10::toString(dtype));
  }
}

TEST_P(ConformanceTest, PartsNeedAFormatThatAllRanksWrite) {
  if (format_->all_ranks_write()) GTEST_SKIP() << GetParam() << " holds parts";
  State state = SmallState();
  state.sharded["moment"] = {.global_shape = {10}, .parts = {{FlatRange{5, 10}, at::zeros({5})}}};
  const absl::Status status = Write(state, Path("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "'moment'")) << status;
  state = SmallState();
  state.per_rank.emplace(0, NewTree());
  EXPECT_EQ(Write(state, Path("a")).code(), absl::StatusCode::kInvalidArgument);
}

// Paths of a request.
ReadRequest RequestOf(const std::vector<std::string>& paths) {
  ReadRequest request;
  for (const std::string& path : paths) request.parts[path] = Whole{};
  return request;
}

TEST_P(ConformanceTest, OnlyWhatIsAskedForIsRead) {
  const State state = Sample();
  ASSERT_TRUE(Write(state, Path("a")).ok());
  const absl::StatusOr<State> read =
      format_->Read(Path("a"), RequestOf({"tensors/Half", "tensors/transposed", "by number/-7",
                                          "tuple", "integers", "empty dict"}));
  ASSERT_TRUE(read.ok()) << read.status();
  const c10::impl::GenericDict all_tensors = state.root.at("tensors").toGenericDict();
  c10::impl::GenericDict tensors = NewTree();
  tensors.insert("Half", all_tensors.at("Half"));
  tensors.insert("transposed", all_tensors.at("transposed"));
  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  by_number.insert(int64_t{-7}, "minus seven");
  c10::impl::GenericDict expected = NewTree();
  expected.insert("tensors", tensors);
  expected.insert("integers", state.root.at("integers"));
  expected.insert("tuple", state.root.at("tuple"));
  expected.insert("by number", by_number);
  expected.insert("empty dict", NewTree());
  EXPECT_EQ(Difference(expected, read->root), "");
  EXPECT_TRUE(read->sharded.empty());
  const State below = format_->Read(Path("a"), RequestOf({"tensors"})).value();
  EXPECT_EQ(below.root.size(), 1u);
  EXPECT_EQ(Difference(all_tensors, below.root.at("tensors")), "");
}

// Bytes that this process has asked the system for, by read and pread.
int64_t BytesRead() {
  std::ifstream file("/proc/self/io");
  std::string word;
  int64_t bytes = -1;
  while (file >> word && word != "rchar:") {
  }
  file >> bytes;
  return bytes;
}

// The same tree, with nothing but shapes and dtypes of tensors.
void ExpectMeta(const c10::IValue& whole, const c10::IValue& meta, const std::string& path) {
  if (whole.isGenericDict()) {
    ASSERT_TRUE(meta.isGenericDict()) << path;
    ASSERT_EQ(whole.toGenericDict().size(), meta.toGenericDict().size()) << path;
    for (const auto& entry : whole.toGenericDict()) {
      ASSERT_TRUE(meta.toGenericDict().contains(entry.key())) << path;
      ExpectMeta(entry.value(), meta.toGenericDict().at(entry.key()),
                 absl::StrCat(path, "/", KeyText(entry.key())));
    }
  } else if (whole.isTensor()) {
    ASSERT_TRUE(meta.isTensor()) << path;
    EXPECT_TRUE(meta.toTensor().is_meta()) << path;
    EXPECT_EQ(whole.toTensor().sizes(), meta.toTensor().sizes()) << path;
    EXPECT_EQ(whole.toTensor().scalar_type(), meta.toTensor().scalar_type()) << path;
  } else {
    EXPECT_EQ(Difference(whole, meta), "") << path;
  }
}

TEST_P(ConformanceTest, ShapesAreReadWithoutData) {
  State state = Sample();
  state.root.insert("large", at::zeros({1 << 20}));
  ASSERT_TRUE(Write(state, Path("a")).ok());
  const int64_t before = BytesRead();
  const absl::StatusOr<State> meta = format_->Read(Path("a"), {.meta = true});
  const int64_t read = BytesRead() - before;
  ASSERT_TRUE(meta.ok()) << meta.status();
  ExpectMeta(state.root, meta->root, "");
  EXPECT_LT(read, 200'000);  // what describes the tensors; these have 4 MiB
  ASSERT_GT(before, 0);
  // Of what a request names, too; parts have their data.
  ReadRequest request = RequestOf({"large"});
  request.parts["tensors/Half"] = FlatRange{0, 2};
  request.meta = true;
  const absl::StatusOr<State> some = format_->Read(Path("a"), request);
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_TRUE(some->root.at("large").toTensor().is_meta());
  EXPECT_FALSE(some->sharded.at("tensors/Half").parts[0].tensor.is_meta());
}

TEST_P(ConformanceTest, WhatCannotBeGivenIsNamed) {
  ASSERT_TRUE(Write(Sample(), Path("a")).ok());
  const auto refused = [&](const ReadRequest& request, absl::string_view what) {
    const absl::Status status = format_->Read(Path("a"), request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("a"))) << status;
  };
  refused(RequestOf({"tensors/none"}), "'tensors/none'");
  refused(RequestOf({"text", "tensor"}), "'tensor'");
  refused(RequestOf({"by number/1"}), "'by number/1'");
  refused(RequestOf({"tuple/0"}), "'tuple'");
  refused(RequestOf({"tensors", "tensors/Half"}), "below 'tensors'");
  refused({{{"text", FlatRange{0, 1}}}}, "'text'");
  refused({{{"tensors/Half", FlatRange{20, 25}}}}, "elements [20, 25) of [2, 3, 4]");
  refused({{{"tensors/Half", Box{{0, 0, 3}, {1, 1, 2}}}}}, "dimension 2");
  refused({{{"tensors/Half", Box{{0, 0}, {1, 1}}}}}, "'tensors/Half'");
}

// Compares a part as it was read with the same part of the whole.
void ExpectPart(Format& format, const std::string& path, const std::string& name,
                const at::Tensor& whole, const Part& part,
                const std::vector<int64_t>& memory_order = {}) {
  const absl::StatusOr<State> read =
      format.Read(path, {.parts = {{name, Wanted({part}, memory_order)}}});
  const Shard shard{whole.sizes().vec(), part, memory_order};
  ASSERT_TRUE(read.ok()) << name << ", " << ToString(shard) << ": " << read.status();
  ASSERT_TRUE(read->root.empty());
  ASSERT_EQ(read->sharded.size(), 1u);
  const ShardedTensor& tensor = read->sharded.at(name);
  ASSERT_EQ(tensor.global_shape, shard.global_shape);
  ASSERT_EQ(tensor.dtype, whole.scalar_type());
  ASSERT_EQ(tensor.parts.size(), 1u);
  ASSERT_TRUE(tensor.parts[0].part == part);
  ASSERT_TRUE(CheckShards(*read).ok()) << CheckShards(*read);
  c10::impl::GenericDict wanted = NewTree(), given = NewTree();
  wanted.insert(name, PartOf(whole.detach(), part, memory_order));
  given.insert(name, tensor.parts[0].tensor);
  ASSERT_EQ(Difference(wanted, given), "") << ToString(shard);
}

TEST_P(ConformanceTest, PartsAreThoseOfTheWhole) {
  State state;
  for (const auto& entry : Sample().root.at("tensors").toGenericDict()) {
    state.root.insert(entry.key(), entry.value());
  }
  // Large enough that not all of it may be read for a part.
  const at::Tensor large = at::arange(600 * 400, at::kInt).reshape({600, 400});
  state.root.insert("large", large);
  state.root.insert("large transposed", large.t());
  state.root.insert("large inside", large.narrow(0, 3, 500).narrow(1, 7, 300));
  state.root.insert("large cube", large.reshape({20, 30, 400}).permute({2, 0, 1}));
  ASSERT_TRUE(Write(state, Path("a")).ok());
  std::mt19937 random(5);
  for (const auto& entry : state.root) {
    const std::string name = entry.key().toStringRef();
    const at::Tensor whole = entry.value().toTensor();
    const int64_t elements = whole.numel();
    for (int i = 0; i < 6; ++i) {
      const auto below = [&](int64_t limit) {
        return static_cast<int64_t>(random() % static_cast<uint64_t>(limit + 1));
      };
      const int64_t begin = i == 0 ? 0 : below(elements);
      const int64_t end = i == 0 ? elements : begin + below(elements - begin);
      ExpectPart(*format_, Path("a"), name, whole, FlatRange{begin, end});
      std::vector<int64_t> order(static_cast<size_t>(whole.dim()));
      std::iota(order.begin(), order.end(), int64_t{0});
      std::shuffle(order.begin(), order.end(), random);
      ExpectPart(*format_, Path("a"), name, whole, FlatRange{begin, end}, order);
      Box box;
      for (int64_t size : whole.sizes()) {
        box.offset.push_back(i == 0 ? 0 : below(size));
        box.sizes.push_back(i == 0 ? size : below(size - box.offset.back()));
      }
      ExpectPart(*format_, Path("a"), name, whole, box);
    }
  }
  for (const char* name : {"large", "large transposed", "large inside"}) {
    const at::Tensor whole = state.root.at(name).toTensor();
    ExpectPart(*format_, Path("a"), name, whole, Box{{5, 17}, {300, 1}});
    ExpectPart(*format_, Path("a"), name, whole, Box{{17, 0}, {1, 300}});
    ExpectPart(*format_, Path("a"), name, whole, Box{{0, 17}, {300, 3}});
  }
}

TEST_P(ConformanceTest, SeveralPartsAndNoneOfOneTensor) {
  State state = SmallState();
  const at::Tensor cube = at::arange(4 * 5 * 6, at::kInt).reshape({4, 5, 6});
  state.root.insert("cube", cube);
  ASSERT_TRUE(Write(state, Path("a")).ok());
  const std::vector<Part> parts = {FlatRange{100, 120}, Box{{1, 1, 1}, {2, 2, 2}}, FlatRange{3, 30},
                                   FlatRange{7, 7}};
  ReadRequest request;
  request.parts["cube"] = Wanted(parts, {2, 0, 1});
  request.parts["weight"] = Wanted(std::vector<Part>());
  request.parts["absent"].optional = true;
  const absl::StatusOr<State> read = format_->Read(Path("a"), request);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->root.empty());
  ASSERT_EQ(read->sharded.size(), 2u);
  EXPECT_EQ(read->sharded.at("weight").global_shape, std::vector<int64_t>{5});
  EXPECT_TRUE(read->sharded.at("weight").parts.empty());
  const ShardedTensor& given = read->sharded.at("cube");
  ASSERT_EQ(given.parts.size(), parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_TRUE(at::equal(given.parts[i].tensor, PartOf(cube, parts[i], {2, 0, 1}))) << i;
  }
  request.parts["cube"].memory_order = {0, 1};
  EXPECT_EQ(format_->Read(Path("a"), request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(ConformanceTest, PartsBesideAllElse) {
  ASSERT_TRUE(Write(Sample(), Path("a")).ok());
  ReadRequest request{.all_else = true};
  request.parts["tensors/Half"] = FlatRange{4, 9};
  request.parts["tensors/Float"] = FlatRange{0, 1 << 20};  // there is no such part
  for (const char* absent : {"absent/x", "text/x", "tensors/absent"}) {
    request.parts[absent] = FlatRange{0, 1};
    request.parts[absent].optional = true;
  }
  const absl::StatusOr<State> read = format_->Read(Path("a"), request);
  ASSERT_TRUE(read.ok()) << read.status();
  const c10::impl::GenericDict expected = Sample().root.copy();
  const c10::impl::GenericDict tensors = expected.at("tensors").toGenericDict().copy();
  const at::Tensor half = tensors.at("Half").toTensor();
  EXPECT_EQ(tensors.erase("Half"), 1u);
  expected.insert_or_assign("tensors", tensors);
  EXPECT_EQ(Difference(expected, read->root), "");
  ASSERT_EQ(read->sharded.size(), 1u);
  const ShardedTensor& given = read->sharded.at("tensors/Half");
  EXPECT_EQ(given.global_shape, half.sizes().vec());
  ASSERT_EQ(given.parts.size(), 1u);
  EXPECT_TRUE(at::equal(given.parts[0].tensor, half.flatten().narrow(0, 4, 5)));
  request.parts["tensors/absent"].optional = false;
  EXPECT_EQ(format_->Read(Path("a"), request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(ConformanceTest, WhatWasWrittenIsComplete) {
  ASSERT_TRUE(Write(Sample(), Path("a")).ok());
  EXPECT_TRUE(format_->CheckComplete(Path("a")).ok()) << format_->CheckComplete(Path("a"));
}

TEST_P(ConformanceTest, AnExistingFileIsNotTouched) {
  if (format_->all_ranks_write()) GTEST_SKIP() << "the manager makes the folder";
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "precious").ok());
  EXPECT_EQ(format_->Write(SmallState(), Path("a")).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadFile(Path("a")).value(), "precious");
}

TEST_P(ConformanceTest, MissingAndForeignFilesAreToldApart) {
  EXPECT_EQ(format_->Read(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(format_->CheckComplete(Path("none")).code(), absl::StatusCode::kNotFound);
  for (absl::string_view contents : {"", "x", "PK", "PK\x03\x04", "<html>404</html>"}) {
    ASSERT_TRUE(WriteFileAtomically(Path("foreign"), contents).ok());
    const absl::Status status = format_->Read(Path("foreign")).status();
    // No damage makes an HTML page of a checkpoint.
    const bool is_other = absl::StartsWith(contents, "<") && !format_->all_ranks_write();
    EXPECT_EQ(status.code(),
              is_other ? absl::StatusCode::kUnimplemented : absl::StatusCode::kDataLoss)
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("foreign"))) << status;
    EXPECT_EQ(format_->CheckComplete(Path("foreign")), status);
  }
  ASSERT_TRUE(MakeDirectories(Path("folder")).ok());
  EXPECT_EQ(format_->Read(Path("folder")).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(format_->CheckComplete(Path("folder")).code(), absl::StatusCode::kDataLoss);
}

TEST_P(ConformanceTest, EveryTruncationIsRefused) {
  ASSERT_TRUE(Write(SmallState(), Path("whole")).ok());
  for (const std::string& file : FilesOf(Path("whole"))) {
    const std::string whole = ReadFile(file).value();
    const auto refused = [&](absl::string_view contents) {
      const std::string where = absl::StrCat(file, " of ", contents.size());
      Put(file, contents);
      const absl::Status status = format_->Read(Path("whole")).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << where << ": " << status;
      ASSERT_TRUE(absl::StrContains(status.message(), Path("whole"))) << status;
      ASSERT_EQ(format_->CheckComplete(Path("whole")), status) << where;
      // What does not lie in this file may be given.
      const absl::StatusOr<State> part = format_->Read(Path("whole"), RequestOf({"epoch"}));
      if (part.ok() && format_->all_ranks_write()) {
        ASSERT_EQ(part->root.at("epoch").toInt(), 3);
      } else {
        ASSERT_EQ(part.status(), status) << where;
      }
    };
    for (size_t size = 0; size < whole.size(); ++size) refused(whole.substr(0, size));
    refused(absl::StrCat(whole, "x"));
    Put(file, whole);
  }
  EXPECT_TRUE(format_->Read(Path("whole")).ok());
}

TEST_P(ConformanceTest, EveryFlippedByteIsRefusedOrHarmless) {
  const State state = SmallState();
  ASSERT_TRUE(Write(state, Path("whole")).ok());
  size_t refused = 0, bytes = 0;
  for (const std::string& file : FilesOf(Path("whole"))) {
    const std::string whole = ReadFile(file).value();
    bytes += whole.size();
    for (size_t at = 0; at < whole.size(); ++at) {
      for (int mask : {0x01, 0x80, 0xff}) {
        std::string flipped = whole;
        flipped[at] = static_cast<char>(flipped[at] ^ mask);
        Put(file, flipped);
        const absl::StatusOr<State> read = format_->Read(Path("whole"));
        ASSERT_EQ(format_->Read(Path("whole"), {.only_check = true}).status(), read.status());
        const absl::Status complete = format_->CheckComplete(Path("whole"));
        ASSERT_TRUE(complete.ok() || absl::IsDataLoss(complete)) << "byte " << at << complete;
        if (read.ok()) {
          ASSERT_EQ(Difference(state.root, read->root), "") << "byte " << at;
          ASSERT_TRUE(complete.ok()) << "byte " << at << complete;
        } else {
          ASSERT_EQ(read.status().code(), absl::StatusCode::kDataLoss)
              << "byte " << at << ": " << read.status();
          ++refused;
        }
      }
    }
    Put(file, whole);
  }
  // Some bytes mean nothing (padding, dates); most do.
  EXPECT_GT(refused, bytes);
}

TEST_P(ConformanceTest, AFolderLacksNoFileAndMayHaveOthers) {
  ASSERT_TRUE(Write(SmallState(), Path("whole")).ok());
  if (!std::filesystem::is_directory(Path("whole"))) GTEST_SKIP() << GetParam() << " is one file";
  ASSERT_GE(FilesOf(Path("whole")).size(), 2u);
  for (const std::string& file : FilesOf(Path("whole"))) {
    const std::string whole = ReadFile(file).value();
    for (const bool is_folder : {false, true}) {
      std::filesystem::remove(file);
      if (is_folder) std::filesystem::create_directory(file);
      const absl::Status status = format_->Read(Path("whole")).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << file << ": " << status;
      EXPECT_TRUE(absl::StrContains(status.message(), Path("whole"))) << status;
      EXPECT_EQ(format_->CheckComplete(Path("whole")), status);
    }
    std::filesystem::remove(file);
    // As to a disk that is not mounted.
    std::filesystem::create_symlink("nowhere", file);
    const absl::Status leads_nowhere = format_->Read(Path("whole")).status();
    EXPECT_EQ(leads_nowhere.code(), absl::StatusCode::kFailedPrecondition) << leads_nowhere;
    EXPECT_TRUE(absl::StrContains(leads_nowhere.message(), file + " is a symbolic link"))
        << leads_nowhere;
    EXPECT_EQ(format_->CheckComplete(Path("whole")), leads_nowhere);
    std::filesystem::remove(file);
    Put(file, whole);
  }
  Put(absl::StrCat(Path("whole"), "/notes.txt"), "of a user");
  Put(absl::StrCat(Path("whole"), "/rank_00007.ranges"), "of nobody");
  const absl::StatusOr<State> read = format_->Read(Path("whole"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(SmallState().root, read->root), "");
  EXPECT_TRUE(format_->CheckComplete(Path("whole")).ok());
}

// Nothing is damaged: `git lfs pull` must find each pointer under its name.
TEST_P(ConformanceTest, APointerOfGitLfsIsNoDamage) {
  ASSERT_TRUE(Write(SmallState(), Path("whole")).ok());
  for (const std::string& file : FilesOf(Path("whole"))) {
    const std::string whole = ReadFile(file).value();
    Put(file, "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n");
    const absl::Status status = format_->Read(Path("whole")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << file << ": " << status;
    EXPECT_TRUE(absl::StrContains(
        status.message(), absl::StrCat(file, " is a pointer of git LFS and not the file itself")))
        << status;
    EXPECT_EQ(format_->CheckComplete(Path("whole")), status);
    Put(file, whole);
  }
  EXPECT_TRUE(format_->Read(Path("whole")).ok());
}

TEST_P(ConformanceTest, EachFailingCallIsReported) {
  FaultyFileSystem counted;
  ASSERT_TRUE(
      Write(*CreateFormat(GetParam(), {.files = &counted}).value(), SmallState(), Path("a")).ok());
  ASSERT_GE(counted.calls().size(), 4u);
  for (size_t nth = 1; nth <= counted.calls().size(); ++nth) {
    FaultyFileSystem files({.nth = static_cast<int64_t>(nth), .error = ENOSPC});
    const auto format = CreateFormat(GetParam(), {.files = &files}).value();
    const std::string path = Path(absl::StrCat("b", nth));
    const absl::Status status = Write(*format, SmallState(), path);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << counted.calls()[nth - 1];
    EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  }
}

// All writes go to /dev/full.
class FullDisk : public FileSystem {
  int Open(const char*, int, mode_t) override { return ::open("/dev/full", O_WRONLY | O_CLOEXEC); }
};

TEST_P(ConformanceTest, AFullDiskIsNamed) {
  FullDisk files;
  const auto format = CreateFormat(GetParam(), {.files = &files}).value();
  const absl::Status status = Write(*format, Sample(), Path("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
}

INSTANTIATE_TEST_SUITE_P(Formats, ConformanceTest, testing::ValuesIn(WritableFormats()),
                         [](const auto& info) { return info.param; });

TEST(FormatRegistryTest, NamesWhatIsLinked) {
  EXPECT_EQ(FormatRegistry::Names(),
            (std::vector<std::string>{"dcp", "pt", "safetensors", "sharded"}));
  EXPECT_EQ(WritableFormats(), (std::vector<std::string>{"pt", "safetensors", "sharded"}));
  const absl::Status status = CreateFormat("hdf5").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(),
            "unknown checkpoint format 'hdf5'; linked into this program: dcp, pt, "
            "safetensors, sharded");
}

}  // namespace
}  // namespace ddp::checkpoint
