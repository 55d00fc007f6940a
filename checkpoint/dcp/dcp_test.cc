// The format as a whole: folders that Python wrote (testdata/make_golden.py), damaged ones, and
// what WriteCheckpoint writes.
#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "base/options.h"
#include "base/runfiles.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::dcp {
namespace {

namespace fs = std::filesystem;

std::string Golden(absl::string_view name) {
  const std::string metadata =
      Runfile(absl::StrCat("libtorch_ddp/checkpoint/dcp/testdata/", name, "/.metadata")).value();
  return DirectoryOf(metadata);
}

State Expected(absl::string_view name) {
  return CreateFormat("pt").value()->Read(absl::StrCat(Golden(name), "/expected.pt")).value();
}

std::string Fresh(absl::string_view name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/dcp_test_", name);
  fs::remove_all(path);
  return path;
}

// A copy that may be changed; Bazel's own files are links.
std::string Copy(absl::string_view golden) {
  const std::string to = Fresh("copy");
  fs::create_directories(to);
  for (const auto& entry : fs::directory_iterator(Golden(golden))) {
    const std::string bytes = ReadFile(entry.path().string()).value();
    std::ofstream(to + "/" + entry.path().filename().string(), std::ios::binary) << bytes;
  }
  return to;
}

void Put(const std::string& path, absl::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::unique_ptr<Format> Dcp() { return CreateFormat("dcp").value(); }

void ExpectRefused(const std::string& path, absl::string_view what,
                   absl::StatusCode code = absl::StatusCode::kDataLoss) {
  const absl::Status status = Dcp()->Read(path).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  EXPECT_EQ(Dcp()->CheckComplete(path).code(), code);
}

class GoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, WhatPythonWroteIsRead) {
  const std::string path = Copy(GetParam());
  const absl::StatusOr<State> read = Dcp()->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(Expected(GetParam()).root, read->root), "");
  EXPECT_TRUE(read->sharded.empty());
  EXPECT_TRUE(Dcp()->CheckComplete(path).ok()) << Dcp()->CheckComplete(path);
  // Other files count for nothing, and the folder may have any name.
  Put(path + "/README", "x");
  Put(path + "/__9_0.distcp", "x");
  const absl::StatusOr<State> loaded = Manager::Load(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(Difference(Expected(GetParam()).root, loaded->root), "");
}

// Every box and range of every tensor of the model that begins and ends at certain places.
TEST_P(GoldenTest, PartsAreThoseOfTheWhole) {
  const std::string path = Copy(GetParam());
  const c10::impl::GenericDict model = Expected(GetParam()).root.at("model").toGenericDict();
  for (const auto& entry : model) {
    const std::string name = absl::StrCat("model/", entry.key().toStringRef());
    const at::Tensor whole = entry.value().toTensor();
    const auto expect = [&](const Part& part, const at::Tensor& expected) {
      const absl::StatusOr<State> read = Dcp()->Read(path, {{{name, part}}});
      ASSERT_TRUE(read.ok()) << read.status();
      const ShardedTensor& tensor = read->sharded.at(name);
      ASSERT_EQ(tensor.parts.size(), 1u);
      EXPECT_TRUE(tensor.parts[0].tensor.equal(expected)) << ToString({whole.sizes().vec(), part});
      EXPECT_TRUE(tensor.parts[0].part == part);
      EXPECT_EQ(tensor.global_shape, whole.sizes().vec());
      EXPECT_TRUE(CheckShards(*read).ok());
    };
    for (int64_t begin = 0; begin <= whole.numel(); begin += 2) {
      for (int64_t end = begin; end <= whole.numel(); end += 3) {
        expect(FlatRange{begin, end}, whole.reshape({-1}).slice(0, begin, end));
      }
    }
    for (int64_t begin = 0; begin <= whole.size(0); ++begin) {
      for (int64_t end = begin; end <= whole.size(0); ++end) {
        Box box{.offset = {begin}, .sizes = {end - begin}};
        at::Tensor expected = whole.slice(0, begin, end);
        if (whole.dim() == 2) {
          box.offset.push_back(1);
          box.sizes.push_back(whole.size(1) - 2);
          expected = expected.slice(1, 1, whole.size(1) - 1);
        }
        expect(box, expected);
      }
    }
  }
}

// Several parts of one tensor, and ranges that count in another order of dimensions.
TEST_P(GoldenTest, PartsInMemoryOrder) {
  const std::string path = Copy(GetParam());
  const at::Tensor whole =
      Expected(GetParam()).root.at("model").toGenericDict().at("0.weight").toTensor();
  const Wanted wanted(std::vector<Part>{FlatRange{1, 13}, FlatRange{28, 30}, Box{{1, 2}, {3, 1}}},
                      {1, 0});
  Wanted missing = FlatRange{0, 1};
  missing.optional = true;
  const absl::StatusOr<State> read =
      Dcp()->Read(path, {{{"model/0.weight", wanted}, {"model/none", missing}}});
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->sharded.size(), 1u);
  const ShardedTensor& tensor = read->sharded.at("model/0.weight");
  EXPECT_TRUE(CheckShards(*read).ok());
  ASSERT_EQ(tensor.parts.size(), 3u);
  const at::Tensor ordered = whole.t().reshape({-1});
  EXPECT_TRUE(tensor.parts[0].tensor.equal(ordered.slice(0, 1, 13)));
  EXPECT_TRUE(tensor.parts[1].tensor.equal(ordered.slice(0, 28, 30)));
  EXPECT_TRUE(tensor.parts[2].tensor.equal(whole.slice(0, 1, 4).slice(1, 2, 3)));
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenTest, testing::Values("one_rank", "two_ranks"));

TEST(DcpTest, OnlyWhatIsAskedForIsRead) {
  const std::string path = Copy("one_rank");
  const State expected = Expected("one_rank");
  const absl::StatusOr<State> read = Dcp()->Read(path, {{{"optimizer/state/0/exp_avg", Whole{}},
                                                         {"optimizer/param_groups", Whole{}},
                                                         {"epoch", Whole{}}}});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->root.size(), 2u);
  EXPECT_EQ(Difference(read->root.at("epoch"), int64_t{3}), "");
  const auto optimizer = expected.root.at("optimizer").toGenericDict();
  const auto mine = read->root.at("optimizer").toGenericDict();
  EXPECT_EQ(Difference(optimizer.at("param_groups"), mine.at("param_groups")), "");
  const auto first = mine.at("state").toGenericDict().at(int64_t{0}).toGenericDict();
  EXPECT_EQ(first.size(), 1u);
  const auto refused = [&](const ReadRequest& request, absl::string_view what) {
    const absl::Status status = Dcp()->Read(path, request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  };
  refused({{{"model/none", Whole{}}}}, "'model/none'");
  refused({{{"model", Whole{}}, {"model/0.weight", Whole{}}}}, "below 'model'");
  refused({{{"tensors/0", Whole{}}}}, "'tensors'");
  refused({{{"epoch", FlatRange{0, 1}}}}, "'epoch'");
  refused({{{"model", FlatRange{0, 1}}}}, "'model'");
  refused({{{"model/0.weight", FlatRange{20, 31}}}}, "elements [20, 31) of [5, 6]");
}

TEST(DcpTest, WhatIsNoCheckpointIsSaid) {
  const std::string path = Fresh("none");
  ExpectRefused(path, "no such folder", absl::StatusCode::kNotFound);
  fs::create_directories(path);
  ExpectRefused(path, "has no file .metadata");
  Put(path + "/__0_0.distcp", "x");
  ExpectRefused(path, "has no file .metadata");
  Put(path + "/__0.metadata", "x");
  ExpectRefused(path, "use_collectives=False", absl::StatusCode::kUnimplemented);
  Put(path + "/.metadata", "");
  ExpectRefused(path, "ends without the stop opcode");
  Put(path + "/.metadata",
      "\x80\x02"
      "cos\nsystem\n.");
  ExpectRefused(path, "'os.system'");
  fs::remove(path + "/.metadata");
  fs::create_directories(path + "/.metadata");
  ExpectRefused(path, "no regular file");
  const std::string file = Fresh("file");
  Put(file, "x");
  ExpectRefused(file, "is no folder");
}

TEST(DcpTest, MissingAndShortFilesAreNamed) {
  const std::string path = Copy("two_ranks");
  const std::string data = path + "/__1_0.distcp";
  const std::string bytes = ReadFile(data).value();
  for (size_t size = 0; size < bytes.size(); size += 1009) {
    Put(data, absl::string_view(bytes).substr(0, size));
    // At its end is the part of a tensor that is empty on that rank: nothing needs it.
    constexpr size_t kEmptyItem = 1500;
    if (Dcp()->Read(path).ok() && size + kEmptyItem > bytes.size()) continue;
    ExpectRefused(path, "is cut off");
  }
  fs::remove(data);
  ExpectRefused(path, "__1_0.distcp is missing");
  fs::create_directories(data);
  ExpectRefused(path, "no regular file");
}

TEST(DcpTest, PointersOfGitLfsAreNamed) {
  for (const absl::string_view file : {".metadata", "__0_0.distcp"}) {
    const std::string path = Copy("one_rank");
    ASSERT_TRUE(fs::exists(absl::StrCat(path, "/", file)));
    Put(absl::StrCat(path, "/", file),
        "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n");
    ExpectRefused(path, absl::StrCat(file, " is a pointer of git LFS"),
                  absl::StatusCode::kUnimplemented);
  }
}

TEST(DcpTest, NoPathLeadsOutOfTheFolder) {
  for (const char* name : {".metadata", "__0_0.distcp"}) {
    const std::string path = Copy("two_ranks");
    const std::string outside = Fresh("outside");
    fs::rename(absl::StrCat(path, "/", name), outside);
    fs::create_symlink(outside, absl::StrCat(path, "/", name));
    ExpectRefused(path, absl::StrCat(name, " is a symbolic link"),
                  absl::StatusCode::kFailedPrecondition);
  }
  // The folder itself may be one.
  const std::string link = Fresh("link");
  fs::create_symlink(Copy("two_ranks"), link);
  EXPECT_TRUE(Dcp()->Read(link).ok());
}

// Each item has CRC-32s: flips are found, but those in bytes that mean nothing.
TEST(DcpTest, EveryFlippedByteOfDataIsRefusedOrHarmless) {
  const std::string path = Copy("two_ranks");
  const State whole = Expected("two_ranks");
  for (const char* name : {"__0_0.distcp", "__1_0.distcp"}) {
    const std::string data = absl::StrCat(path, "/", name);
    const std::string bytes = ReadFile(data).value();
    size_t refused = 0, tried = 0;
    for (size_t at = 0; at < bytes.size(); at += 101) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
      Put(data, flipped);
      const absl::StatusOr<State> read = Dcp()->Read(path);
      ++tried;
      if (read.ok()) {
        ASSERT_EQ(Difference(whole.root, read->root), "") << name << ", byte " << at;
      } else {
        ASSERT_TRUE(absl::IsDataLoss(read.status()) || absl::IsUnimplemented(read.status()))
            << read.status();
        ASSERT_TRUE(absl::StrContains(read.status().message(), data)) << read.status();
        ++refused;
      }
    }
    EXPECT_GT(refused, tried / 4) << name;
    Put(data, bytes);
  }
}

// Shapes and types are in .metadata and in the items. Names stand there alone, without a checksum.
TEST(DcpTest, AFlippedByteOfTheIndexNeverChangesValues) {
  const std::string path = Copy("two_ranks");
  const State whole = Expected("two_ranks");
  const std::string bytes = ReadFile(path + "/.metadata").value();
  for (size_t at = 0; at < bytes.size(); at += 29) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x04);
    Put(path + "/.metadata", flipped);
    const absl::StatusOr<State> read = Dcp()->Read(path);
    if (!read.ok()) continue;
    for (const auto& entry : read->root) {
      if (!whole.root.contains(entry.key())) continue;
      if (entry.value().isGenericDict()) continue;  // with a name below that may differ
      ASSERT_EQ(Difference(whole.root.at(entry.key()), entry.value()), "") << "byte " << at;
    }
  }
}

// What proves a checkpoint whole stands in none of Python's: a run's folder takes none.
TEST(DcpTest, WhereChecksumsAreNeededItIsRefused) {
  const std::string path = Copy("one_rank");
  const auto format = CreateFormat("dcp", {.accept_unverified = false}).value();
  for (const absl::Status& status : {format->Read(path).status(), format->CheckComplete(path)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "no checksum of .metadata")) << status;
  }
}

TEST(DcpTest, ItIsNoFormatToSaveIn) {
  EXPECT_EQ(Dcp()->Write(State(), "x").code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(Dcp()->Write(State(), "x").message(), "ckpt convert"));
  const absl::Status status = Validate(ManagerOptions{.directory = "runs/a", .format = "dcp"});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "format=dcp is no format to save in")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "ckpt convert")) << status;
  const std::string folder = Fresh("run");
  const SingleRank ranks;
  EXPECT_FALSE(Manager::Create({.directory = folder, .format = "dcp"}, ranks).ok());
}

// A checkpoint that was converted in a run's folder is not one of the run.
TEST(DcpTest, ARunDoesNotResumeFromIt) {
  const std::string folder = Fresh("run");
  fs::create_directories(folder);
  ASSERT_TRUE(WriteCheckpoint(SampleState(), folder + "/epoch_7.dcp").ok());
  SingleRank ranks;
  const auto manager = Manager::Create({.directory = folder}, ranks).value();
  EXPECT_EQ(manager->Newest().value(), std::nullopt);
  EXPECT_TRUE(Manager::Load(folder + "/epoch_7.dcp").ok());
}

// What is left of the sample after Python's way of flattening: no empty dicts, numbers as text.
State Flattened() {
  State state = SampleState();
  (void)state.root.erase("empty dict");
  c10::impl::GenericDict by_number = NewTree();
  by_number.insert("0", "zero");
  by_number.insert("-7", "minus seven");
  state.root.insert_or_assign("by number", by_number);
  return state;
}

TEST(WriterTest, EveryValueComesBackBitForBit) {
  State state = SampleState();
  c10::impl::GenericList nested(c10::AnyType::get());
  c10::impl::GenericDict inside = NewTree();
  inside.insert("x", at::arange(3));
  nested.push_back(inside);
  nested.push_back(c10::List<int64_t>({1, 2}));
  state.root.insert("nested", nested);
  const std::string path = Fresh("written");
  const absl::Status written = WriteCheckpoint(state, path);
  ASSERT_TRUE(written.ok()) << written;
  const absl::StatusOr<State> read = Dcp()->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  State expected = Flattened();
  expected.root.insert("nested", nested);
  EXPECT_EQ(Difference(expected.root, read->root), "");
  EXPECT_TRUE(Dcp()->CheckComplete(path).ok()) << Dcp()->CheckComplete(path);
  // Again, to the same bytes; never over what is there.
  const std::string again = Fresh("again");
  ASSERT_TRUE(WriteCheckpoint(state, again).ok());
  for (const char* name : {"/.metadata", "/__0_0.distcp"}) {
    EXPECT_EQ(ReadFile(path + name).value(), ReadFile(again + name).value()) << name;
  }
  EXPECT_EQ(WriteCheckpoint(state, again).code(), absl::StatusCode::kAlreadyExists);
}

TEST(WriterTest, RareValuesComeBack) {
  State state;
  const at::Tensor complex =
      at::arange(6, at::kFloat).to(at::kComplexFloat).mul(c10::complex<float>(0, 1));
  state.root.insert("conjugate", complex.conj());
  state.root.insert("negative", at::imag(complex.conj()));
  state.root.insert("complex number", c10::complex<double>(1, -2));
  for (c10::ScalarType dtype : {at::kComplexHalf, at::kFloat8_e8m0fnu, at::kBits8, at::kBits16}) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype)) * 3;
    state.root.insert(c10::toString(dtype),
                      at::empty({0}, at::TensorOptions().dtype(dtype))
                          .set_(at::arange(bytes, at::kByte).storage(), 0, {3}, {1}));
  }
  const std::string path = Fresh("written");
  const absl::Status written = WriteCheckpoint(state, path);
  ASSERT_TRUE(written.ok()) << written;
  const absl::StatusOr<State> read = Dcp()->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
  for (const auto& entry : state.root) {
    if (!entry.value().isTensor()) continue;
    const std::string name = entry.key().toStringRef();
    EXPECT_TRUE(Dcp()->Read(path, {{{name, FlatRange{1, 3}}}}).ok()) << name;
  }
}

TEST(WriterTest, OptimizersKeepTheirNumbers) {
  const State state = Expected("one_rank");
  const std::string path = Fresh("written");
  ASSERT_TRUE(WriteCheckpoint(state, path).ok());
  const absl::StatusOr<State> read = Dcp()->Read(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Difference(state.root, read->root), "");
}

TEST(WriterTest, WhatCannotBeHeldIsRefusedByName) {
  const auto refused = [](c10::IValue value, absl::string_view what) {
    State state;
    c10::impl::GenericDict inner = NewTree();
    inner.insert("inner", std::move(value));
    state.root.insert("outer", inner);
    const absl::Status status = WriteCheckpoint(state, Fresh("refused"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "outer/inner")) << what << ": " << status;
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
  itself.push_back(itself);
  refused(itself, "a list in itself");
  itself.clear();
  c10::impl::GenericDict long_key = NewTree();
  long_key.insert(std::string(4097, 'k'), at::ones({2}));
  refused(long_key, "a name that is not read again");

  State twice;
  c10::impl::GenericDict a = NewTree();
  a.insert("b", 1);
  twice.root.insert("a", a);
  twice.root.insert("a.b", 2);
  const absl::Status status = WriteCheckpoint(twice, Fresh("refused"));
  EXPECT_TRUE(absl::StrContains(status.message(), "the name 'a.b'")) << status;

  State sharded;
  sharded.sharded["w"] = {.global_shape = {10}, .parts = {{FlatRange{5, 10}, at::ones({5})}}};
  EXPECT_EQ(WriteCheckpoint(sharded, Fresh("refused")).code(), absl::StatusCode::kInvalidArgument);
  State per_rank;
  per_rank.per_rank.emplace(0, NewTree());
  EXPECT_EQ(WriteCheckpoint(per_rank, Fresh("refused")).code(), absl::StatusCode::kInvalidArgument);
}

TEST(WriterTest, EmptyDictsAreLeftOutAndNamed) {
  State state;
  c10::impl::GenericDict outer = NewTree();
  outer.insert("none", NewTree());
  outer.insert("one", 1);
  c10::impl::GenericList of_ranks(c10::AnyType::get());
  for (int rank = 0; rank < 2; ++rank) of_ranks.push_back(NewTree());
  outer.insert("of_ranks", of_ranks);
  state.root.insert("outer", outer);
  const std::string path = Fresh("empty");
  std::vector<std::string> left_out;
  ASSERT_TRUE(WriteCheckpoint(state, path, FileSystem::Default(), &left_out).ok());
  EXPECT_EQ(left_out, (std::vector<std::string>{"outer/none", "outer/of_ranks"}));
  EXPECT_EQ(Dcp()->Read(path)->root.at("outer").toGenericDict().size(), 1u);
  // The others would have other places.
  of_ranks.push_back(1);
  const absl::Status status = WriteCheckpoint(state, Fresh("empty"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "outer/of_ranks/0")) << status;
}

TEST(WriterTest, EachFailingCallIsReported) {
  State state;
  state.root.insert("w", at::arange(5));
  state.root.insert("epoch", int64_t{3});
  FaultyFileSystem counted;
  ASSERT_TRUE(WriteCheckpoint(state, Fresh("counted"), &counted).ok());
  ASSERT_GE(counted.calls().size(), 9u);
  // The last call closes the folder, when all is durable.
  for (size_t nth = 1; nth < counted.calls().size(); ++nth) {
    FaultyFileSystem files({.nth = static_cast<int64_t>(nth), .error = ENOSPC});
    const absl::Status status = WriteCheckpoint(state, Fresh("faulty"), &files);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << counted.calls()[nth - 1];
    EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
  }
}

}  // namespace
}  // namespace ddp::checkpoint::dcp
