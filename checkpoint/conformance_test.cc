// Requirements for every checkpoint format; runs for each linked format.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
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

  std::string directory_;
  std::unique_ptr<Format> format_;
};

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
  const State state = SampleState();
  ASSERT_TRUE(format_->Write(state, Path("a")).ok()) << format_->Write(state, Path("b"));
  const absl::StatusOr<State> read = format_->Read(Path("a"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
  EXPECT_TRUE(read->shards.empty());
}

TEST_P(ConformanceTest, EqualStatesMakeEqualFiles) {
  ASSERT_TRUE(format_->Write(SampleState(), Path("a")).ok());
  ASSERT_TRUE(format_->Write(SampleState(), Path("b")).ok());
  EXPECT_EQ(ReadFile(Path("a")).value(), ReadFile(Path("b")).value());
}

TEST_P(ConformanceTest, ViewsOfOneStorageStayViewsAndAreWrittenOnce) {
  const at::Tensor whole = at::arange(100000, at::kFloat);
  State one, two;
  one.root.insert("whole", whole);
  two.root.insert("whole", whole);
  two.root.insert("half", whole.slice(0, 0, 50000));
  ASSERT_TRUE(format_->Write(one, Path("one")).ok());
  ASSERT_TRUE(format_->Write(two, Path("two")).ok());
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
  const absl::Status written = format_->Write(state, Path("a"));
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
    const absl::Status status = format_->Write(state, Path("a"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "outer/inner")) << status;
    EXPECT_FALSE(std::filesystem::exists(Path("a"))) << what;
  };
  refused(at::eye(3).to_sparse(), "a sparse tensor");
  refused(at::empty({2}, at::TensorOptions().device(at::kMeta)), "a tensor without values");
  refused(at::Tensor(), "an undefined tensor");
  refused(c10::complex<double>(1, 2), "a complex number");
  refused("\xff\xfe", "text that is not UTF-8");
  c10::impl::GenericDict by_double(c10::FloatType::get(), c10::AnyType::get());
  by_double.insert(0.5, 1);
  refused(by_double, "a dict with keys of another type");
  c10::impl::GenericList itself(c10::AnyType::get());
  itself.push_back(itself);
  refused(itself, "a list in itself");
  itself.clear();
}

TEST_P(ConformanceTest, ShardsNeedAFormatThatAllRanksWrite) {
  if (format_->all_ranks_write()) GTEST_SKIP() << GetParam() << " holds shards";
  State state = SmallState();
  state.shards["weight"] = {.global_shape = {10}, .part = FlatRange{5, 10}};
  const absl::Status status = format_->Write(state, Path("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "'weight'")) << status;
}

// Paths of a request.
ReadRequest RequestOf(const std::vector<std::string>& paths) {
  ReadRequest request;
  for (const std::string& path : paths) request.parts[path] = Whole{};
  return request;
}

TEST_P(ConformanceTest, OnlyWhatIsAskedForIsRead) {
  const State state = SampleState();
  ASSERT_TRUE(format_->Write(state, Path("a")).ok());
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
  EXPECT_TRUE(read->shards.empty());
  const State below = format_->Read(Path("a"), RequestOf({"tensors"})).value();
  EXPECT_EQ(below.root.size(), 1u);
  EXPECT_EQ(Difference(all_tensors, below.root.at("tensors")), "");
}

TEST_P(ConformanceTest, WhatCannotBeGivenIsNamed) {
  ASSERT_TRUE(format_->Write(SampleState(), Path("a")).ok());
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
                const at::Tensor& whole, const Part& part) {
  const absl::StatusOr<State> read = format.Read(path, {{{name, part}}});
  const Shard shard{whole.sizes().vec(), part};
  ASSERT_TRUE(read.ok()) << name << ", " << ToString(shard) << ": " << read.status();
  at::Tensor expected = whole.detach();
  if (const auto* range = std::get_if<FlatRange>(&part)) {
    expected = expected.reshape({-1}).narrow(0, range->begin, range->end - range->begin);
  } else if (const auto* box = std::get_if<Box>(&part)) {
    for (size_t i = 0; i < box->sizes.size(); ++i) {
      expected = expected.narrow(static_cast<int64_t>(i), box->offset[i], box->sizes[i]);
    }
  }
  c10::impl::GenericDict wanted = NewTree();
  wanted.insert(name, expected);
  ASSERT_EQ(Difference(wanted, read->root), "") << ToString(shard);
  ASSERT_EQ(read->shards.size(), 1u);
  ASSERT_EQ(read->shards.at(name).global_shape, shard.global_shape);
  ASSERT_TRUE(read->shards.at(name).part == part);
  ASSERT_TRUE(CheckShards(*read).ok());
}

TEST_P(ConformanceTest, PartsAreThoseOfTheWhole) {
  State state;
  for (const auto& entry : SampleState().root.at("tensors").toGenericDict()) {
    state.root.insert(entry.key(), entry.value());
  }
  // Large enough that not all of it may be read for a part.
  const at::Tensor large = at::arange(600 * 400, at::kInt).reshape({600, 400});
  state.root.insert("large", large);
  state.root.insert("large transposed", large.t());
  state.root.insert("large inside", large.narrow(0, 3, 500).narrow(1, 7, 300));
  state.root.insert("large cube", large.reshape({20, 30, 400}).permute({2, 0, 1}));
  ASSERT_TRUE(format_->Write(state, Path("a")).ok());
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

TEST_P(ConformanceTest, WhatWasWrittenIsComplete) {
  ASSERT_TRUE(format_->Write(SampleState(), Path("a")).ok());
  EXPECT_TRUE(format_->CheckComplete(Path("a")).ok()) << format_->CheckComplete(Path("a"));
}

TEST_P(ConformanceTest, AnExistingFileIsNotTouched) {
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
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("foreign"))) << status;
    EXPECT_EQ(format_->CheckComplete(Path("foreign")), status);
  }
  ASSERT_TRUE(MakeDirectories(Path("folder")).ok());
  if (!format_->all_ranks_write()) {
    EXPECT_EQ(format_->Read(Path("folder")).status().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(format_->CheckComplete(Path("folder")).code(), absl::StatusCode::kDataLoss);
  }
}

// The next two tests modify single-file formats byte by byte; formats with folders have their own
// tests.
TEST_P(ConformanceTest, EveryTruncationIsRefused) {
  if (format_->all_ranks_write()) GTEST_SKIP() << GetParam() << " is not a single file";
  ASSERT_TRUE(format_->Write(SmallState(), Path("whole")).ok());
  const std::string whole = ReadFile(Path("whole")).value();
  for (size_t size = 0; size < whole.size(); ++size) {
    Put(Path("cut"), whole.substr(0, size));
    const absl::Status status = format_->Read(Path("cut")).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << "at " << size << ": " << status;
    ASSERT_EQ(format_->CheckComplete(Path("cut")), status) << "at " << size;
    ASSERT_EQ(format_->Read(Path("cut"), RequestOf({"epoch"})).status(), status) << "at " << size;
  }
  Put(Path("cut"), whole + "x");
  EXPECT_EQ(format_->Read(Path("cut")).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(format_->CheckComplete(Path("cut")).code(), absl::StatusCode::kDataLoss);
}

TEST_P(ConformanceTest, EveryFlippedByteIsRefusedOrHarmless) {
  if (format_->all_ranks_write()) GTEST_SKIP() << GetParam() << " is not a single file";
  const State state = SmallState();
  ASSERT_TRUE(format_->Write(state, Path("whole")).ok());
  const std::string whole = ReadFile(Path("whole")).value();
  size_t refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int mask : {0x01, 0x80, 0xff}) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ mask);
      Put(Path("flipped"), flipped);
      const absl::StatusOr<State> read = format_->Read(Path("flipped"));
      const absl::Status complete = format_->CheckComplete(Path("flipped"));
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
  // Some bytes mean nothing (padding, dates); most do.
  EXPECT_GT(refused, whole.size());
}

TEST_P(ConformanceTest, EachFailingCallIsReported) {
  FaultyFileSystem counted;
  ASSERT_TRUE(
      CreateFormat(GetParam(), {.files = &counted}).value()->Write(SmallState(), Path("a")).ok());
  ASSERT_GE(counted.calls().size(), 4u);
  for (size_t nth = 1; nth <= counted.calls().size(); ++nth) {
    FaultyFileSystem files({.nth = static_cast<int64_t>(nth), .error = ENOSPC});
    const auto format = CreateFormat(GetParam(), {.files = &files}).value();
    const std::string path = Path(absl::StrCat("b", nth));
    const absl::Status status = format->Write(SmallState(), path);
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
  const absl::Status status = format->Write(SampleState(), Path("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
}

INSTANTIATE_TEST_SUITE_P(Formats, ConformanceTest, testing::ValuesIn(FormatRegistry::Names()),
                         [](const auto& info) { return info.param; });

TEST(FormatRegistryTest, NamesWhatIsLinked) {
  EXPECT_EQ(FormatRegistry::Names(), std::vector<std::string>{"pt"});
  const absl::Status status = CreateFormat("hdf5").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "unknown checkpoint format 'hdf5'; linked into this program: pt");
}

}  // namespace
}  // namespace ddp::checkpoint
