// Properties of format pt only: its bytes on disk, and how much of a file is read. The conformance
// suite has the requirements for all formats.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/pt/pickle_writer.h"
#include "checkpoint/pt/zip.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::pt {
namespace {

std::string Path(absl::string_view name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/pt_test_", name, ".pt");
  EXPECT_TRUE(RemoveTree(path).ok());
  return path;
}

// The state of testdata/epoch_2.pt.
State Golden() {
  c10::impl::GenericDict model = NewTree();
  model.insert("fc.weight", at::arange(6, at::kFloat).reshape({2, 3}));
  model.insert("fc.bias", at::arange(2, at::kBFloat16));
  model.insert("steps", at::scalar_tensor(7, at::kLong));
  State state;
  state.root.insert("epoch", int64_t{2});
  state.root.insert("lr", 0.1);
  state.root.insert("model", model);
  state.root.insert("task", "cnn");
  return state;
}

// Existing files must stay readable, and equal states must give equal files in later versions, too.
TEST(PtTest, TheBytesOnDiskStayAsTheyAre) {
  const std::string golden = Runfile("libtorch_ddp/checkpoint/pt/testdata/epoch_2.pt").value();
  const auto format = CreateFormat("pt").value();
  const std::string written = Path("golden");
  ASSERT_TRUE(format->Write(Golden(), written).ok());
  EXPECT_TRUE(ReadFile(written).value() == ReadFile(golden).value());
  const absl::StatusOr<State> read = format->Read(golden);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(Golden().root, read->root), "");
}

State StateOf(const std::vector<at::Tensor>& tensors) {
  State state;
  for (size_t i = 0; i < tensors.size(); ++i) state.root.insert(absl::StrCat(i), tensors[i]);
  return state;
}

// A reader refuses a file whose tensors repeat more elements than this: what is beyond is written.
TEST(PtTest, WhatIsWrittenRepeatsNoMoreThanIsRead) {
  const auto format = CreateFormat("pt").value();
  const at::Tensor gib = at::ones({1}).expand({(int64_t{1} << 28) - 1}), two = at::arange(2);
  const at::Tensor many = two.expand({1 << 16, 2});
  const State state = StateOf({gib, many, two, many});
  const std::string path = Path("repeats");
  ASSERT_TRUE(format->Write(state, path).ok());
  const absl::StatusOr<State> read = format->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->root.at("0").toTensor().strides(), gib.strides());
  EXPECT_TRUE(read->root.at("1").toTensor().is_alias_of(read->root.at("3").toTensor()));
  for (const char* name : {"1", "2", "3"}) {
    EXPECT_TRUE(at::equal(read->root.at(name).toTensor(), state.root.at(name).toTensor())) << name;
  }
}

// Of a storage, no more is written than its tensors have, each for itself.
TEST(PtTest, PartsOfOneStorageAreWrittenAsTensorsOfTheirOwn) {
  const auto format = CreateFormat("pt").value();
  const at::Tensor flat = at::arange(1000, at::kFloat);
  const std::vector<at::Tensor> parts = {
      flat.narrow(0, 300, 100),                            // touches the next one
      flat.as_strided({2, 3, 2, 4}, {24, 1, 12, 3}, 400),  // channels-last
      flat.narrow(0, 448, 0),
      flat.narrow(0, 20, 6).view({2, 3}).t(),
  };
  std::vector<at::Tensor> own;
  for (const at::Tensor& part : parts) {
    own.push_back(at::empty_strided(part.sizes(), part.strides(), at::kFloat).copy_(part));
  }
  const std::string written = Path("parts"), expected = Path("own");
  ASSERT_TRUE(format->Write(StateOf(parts), written).ok());
  ASSERT_TRUE(format->Write(StateOf(own), expected).ok());
  EXPECT_TRUE(ReadFile(written).value() == ReadFile(expected).value());
  EXPECT_EQ(Difference(StateOf(parts).root, format->Read(written).value().root), "");
}

// Also in a storage that has other tensors, as tied weights are with ZeRO.
TEST(PtTest, TensorsThatOverlapShareARecord) {
  const auto format = CreateFormat("pt").value();
  const at::Tensor flat = at::arange(1000, at::kFloat);
  const at::Tensor middle = flat.narrow(0, 300, 100);
  const State state = StateOf({
      flat.narrow(0, 200, 60), middle, middle.view({10, 10}),
      flat.narrow(0, 250, 20),      // overlaps the first one
      flat.narrow(0, 230, 10),      // lies in it
      flat.narrow(0, 700, 50),      // overlaps nothing
      flat.slice(0, 800, 1000, 2),  // these two do not,
      flat.slice(0, 801, 1000, 2),  // but each reaches over the other
  });
  const std::string path = Path("overlapping");
  ASSERT_TRUE(format->Write(state, path).ok());
  const ZipReader zip = ZipReader::Open(path).value();
  const std::vector<uint64_t> elements = {70, 100, 50, 200};
  for (size_t i = 0; i < elements.size(); ++i) {
    EXPECT_EQ(zip.Size(absl::StrCat("archive/data/", i)).value(), 4 * elements[i]) << i;
  }
  EXPECT_FALSE(zip.Has("archive/data/4"));
  const State read = format->Read(path).value();
  EXPECT_EQ(Difference(state.root, read.root), "");
  const auto tensor = [&](const char* name) { return read.root.at(name).toTensor(); };
  EXPECT_TRUE(tensor("1").is_alias_of(tensor("2")));
  EXPECT_TRUE(tensor("0").is_alias_of(tensor("3")) && tensor("0").is_alias_of(tensor("4")));
  EXPECT_TRUE(tensor("6").is_alias_of(tensor("7")));
  EXPECT_FALSE(tensor("0").is_alias_of(tensor("1")));
}

// Two tensors of 16 MiB.
constexpr int64_t kElements = int64_t{4} << 20;
State Large() {
  State state;
  state.root.insert("first", at::arange(kElements, at::kInt));
  state.root.insert("second", at::arange(kElements, at::kInt).neg().reshape({2048, 2048}));
  return state;
}

// Bytes that this process has read, as counted by the kernel; nullopt if it does not count them.
std::optional<int64_t> BytesRead() {
  std::ifstream io("/proc/self/io");
  std::string field;
  int64_t value = 0;
  while (io >> field >> value) {
    if (field == "rchar:") return value;
  }
  return std::nullopt;
}

TEST(PtTest, LittleMoreIsReadThanIsAskedFor) {
  if (!BytesRead().has_value()) GTEST_SKIP() << "this kernel does not count the bytes read";
  const auto format = CreateFormat("pt").value();
  const std::string path = Path("large");
  ASSERT_TRUE(format->Write(Large(), path).ok());
  const auto bytes_read = [&](const ReadRequest& request) {
    const int64_t before = *BytesRead();
    EXPECT_TRUE(format->Read(path, request).ok());
    return *BytesRead() - before;
  };
  constexpr int64_t kMiB = int64_t{1} << 20;
  EXPECT_GE(bytes_read({}), 32 * kMiB);
  EXPECT_LT(bytes_read({{{"first", Whole{}}}}), 17 * kMiB);
  EXPECT_GE(bytes_read({{{"first", Whole{}}}}), 16 * kMiB);
  EXPECT_LT(bytes_read({{{"first", FlatRange{1000, 2000}}}}), kMiB / 16);
  EXPECT_LT(bytes_read({{{"second", Box{{512, 0}, {128, 2048}}}}}), kMiB + kMiB / 16);
  EXPECT_LT(bytes_read({{{"second", FlatRange{1, 2}}}}), kMiB / 16);
  // A column: a small read per row, not the rows.
  EXPECT_LT(bytes_read({{{"second", Box{{0, 100}, {2048, 8}}}}}), kMiB / 4);
  const int64_t before = *BytesRead();
  EXPECT_TRUE(format->CheckComplete(path).ok());
  EXPECT_LT(*BytesRead() - before, kMiB / 16);
}

TEST(PtTest, ACrcIsCheckedWhereTheWholeRecordIsRead) {
  const auto format = CreateFormat("pt").value();
  const std::string path = Path("damaged");
  State state;
  state.root.insert("a", at::full({1000}, 0x11111111, at::kInt));
  state.root.insert("b", at::zeros({1000}, at::kInt));
  ASSERT_TRUE(format->Write(state, path).ok());
  std::string bytes = ReadFile(path).value();
  const size_t data = bytes.find(std::string(4000, 0x11));
  ASSERT_NE(data, std::string::npos);
  bytes[data + 4 * 500] ^= 1;  // in element 500 of "a"
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());

  const absl::Status damaged = format->Read(path).status();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(damaged.message(), "archive/data/0 does not match its CRC-32"))
      << damaged;
  EXPECT_EQ(format->Read(path, {{{"a", Whole{}}}}).status(), damaged);
  EXPECT_TRUE(format->Read(path, {{{"b", Whole{}}}}).ok());
  EXPECT_TRUE(format->Read(path, {{{"a", FlatRange{501, 1000}}}}).ok());
  EXPECT_TRUE(format->CheckComplete(path).ok());
}

// An archive with a sound directory and these records.
using Records = std::vector<std::pair<std::string, std::string>>;
std::string Archive(const Records& records) {
  const std::string path = Path("by_hand");
  FileWriter file = FileWriter::Create(path).value();
  ZipWriter zip(&file);
  for (const auto& [name, data] : records) {
    EXPECT_TRUE(zip.Add(name, data.data(), data.size()).ok());
  }
  EXPECT_TRUE(zip.Finish().ok());
  EXPECT_TRUE(file.Finish().ok());
  return path;
}

// The error of reading such an archive, which must equal that of checking it.
absl::Status StatusOf(const Records& records) {
  const auto format = CreateFormat("pt").value();
  const std::string path = Archive(records);
  const absl::Status complete = format->CheckComplete(path);
  EXPECT_EQ(format->Read(path).status(), complete);
  EXPECT_EQ(format->Read(path, {{{"a", FlatRange{0, 1}}}}).status(), complete);
  return complete;
}

void ExpectDamaged(const Records& records, absl::string_view what) {
  const absl::Status status = StatusOf(records);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << what;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

TEST(PtTest, RecordsAreComparedWithTheirTensors) {
  State state;
  state.root.insert("a", at::zeros({77}, at::kByte));
  const std::string pickle = WritePickle(state.root).value().bytes;
  const std::pair<std::string, std::string> root = {"archive/data.pkl", pickle};
  const std::pair<std::string, std::string> data = {"archive/data/0", std::string(77, 'x')};
  EXPECT_TRUE(StatusOf({root, data}).ok());
  EXPECT_TRUE(StatusOf({root, data, {"archive/byteorder", "little"}}).ok());
  ExpectDamaged({root, {"archive/data/0", std::string(76, 'x')}},
                "76 bytes in record archive/data/0");
  ExpectDamaged({root, {"archive/data/1", std::string(77, 'x')}}, "lacks record archive/data/0");
  ExpectDamaged({data}, "no record data.pkl");
  ExpectDamaged({root, data, {"other/data.pkl", pickle}}, "two records data.pkl");
  ExpectDamaged({root, data, {"archive/byteorder", "big"}}, "big-endian");
  const absl::Status script = StatusOf({root, data, {"archive/constants.pkl", "x"}});
  EXPECT_EQ(script.code(), absl::StatusCode::kUnimplemented) << script;
  EXPECT_TRUE(absl::StrContains(script.message(), "TorchScript")) << script;
}

TEST(PtTest, ARootThatIsNoDictIsRefused) {
  const std::string path = Archive({{"archive/data.pkl", "\x80\x02]."}});
  const auto format = CreateFormat("pt").value();
  for (const absl::Status& status : {format->Read(path).status(), format->CheckComplete(path)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_TRUE(
        absl::StrContains(status.message(), "holds a list at its top, where a dict is needed"))
        << status;
  }
}

// Damage is seen also in a record that no value refers to.
TEST(PtTest, DamageInAnyRecordIsSeen) {
  const auto format = CreateFormat("pt").value();
  const std::string path = Path("version");
  ASSERT_TRUE(format->Write(Golden(), path).ok());
  std::string bytes = ReadFile(path).value();
  const size_t version = bytes.find("3\nPK");
  ASSERT_NE(version, std::string::npos);
  bytes[version] = '4';
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  const absl::Status status = format->Read(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), "archive/version")) << status;
}

}  // namespace
}  // namespace ddp::checkpoint::pt
