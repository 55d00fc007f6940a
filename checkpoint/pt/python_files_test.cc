// Files that Python's torch wrote: testdata/make_python_files.py says how.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/pt/pickle_ops.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::pt {
namespace {

using std::string_literals::operator""s;

std::string Testdata(absl::string_view name) {
  return Runfile(absl::StrCat("libtorch_ddp/checkpoint/pt/testdata/", name)).value();
}

c10::impl::GenericDict ReadAll(const std::string& path) {
  const absl::StatusOr<State> read = CreateFormat("pt").value()->Read(path);
  EXPECT_TRUE(read.ok()) << read.status();
  return read.ok() ? read->root : NewTree();
}

c10::impl::GenericDict Below(const c10::impl::GenericDict& tree, const std::string& key) {
  return tree.at(key).toGenericDict();
}

c10::impl::GenericDict Any() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

c10::IValue TupleOf(std::vector<c10::IValue> items) {
  return c10::ivalue::Tuple::create(std::move(items));
}

c10::IValue ListOf(const std::vector<c10::IValue>& items) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& item : items) list.push_back(item);
  return list;
}

c10::impl::GenericDict Plain() {
  c10::impl::GenericDict plain = Any();
  plain.insert("none", c10::IValue());
  plain.insert("bool", true);
  plain.insert("int", -(int64_t{1} << 62));
  plain.insert("float", 0.1);
  plain.insert("complex", c10::complex<double>(1, -2));
  plain.insert("text", "Grüße 🎉");
  plain.insert("surrogate", "file\xed\xb3\xbf");
  plain.insert("bytes", "\x00\x7f\x80\xff"s);
  plain.insert("no bytes", "");
  plain.insert("bytearray", "\xfe\x01");
  plain.insert("tuple", TupleOf({int64_t{1}, TupleOf({2.5, c10::IValue()})}));
  const c10::IValue shared = ListOf({"shared"});
  plain.insert("lists", ListOf({shared, shared}));
  c10::impl::GenericDict keys = Any();
  keys.insert("a", int64_t{0});
  keys.insert(int64_t{2}, int64_t{1});
  keys.insert(0.5, int64_t{2});
  keys.insert(true, int64_t{3});
  keys.insert(-1.0, int64_t{4});
  plain.insert("keys", keys);
  c10::impl::GenericDict ordered = Any();
  ordered.insert("b", int64_t{1});
  ordered.insert("a", int64_t{2});
  plain.insert("ordered", ordered);
  c10::impl::GenericDict counter = Any();
  counter.insert("a", int64_t{2});
  counter.insert("b", int64_t{1});
  plain.insert("counter", counter);
  plain.insert("size", TupleOf({int64_t{2}, int64_t{3}}));
  plain.insert("device", "cuda:1");
  plain.insert("dtype", "torch.float16");
  plain.insert("layout", "torch.sparse_coo");
  return plain;
}

void ExpectViews(const c10::impl::GenericDict& views) {
  const auto tensor = [&](const char* name) { return views.at(name).toTensor(); };
  const at::Tensor base = tensor("base");
  const at::Tensor expected = at::tensor(
      at::ArrayRef<c10::complex<float>>({c10::complex<float>(1, 2), c10::complex<float>(3, -4)}));
  EXPECT_TRUE(at::equal(base, expected));
  EXPECT_TRUE(tensor("conj").is_conj());
  EXPECT_TRUE(at::equal(tensor("conj").resolve_conj(), expected.conj().resolve_conj()));
  EXPECT_TRUE(tensor("neg").is_neg());
  EXPECT_TRUE(at::equal(tensor("neg").resolve_neg(), at::tensor({-2.0f, 4.0f})));
  EXPECT_TRUE(tensor("both").is_conj() && tensor("both").is_neg());
  EXPECT_TRUE(
      at::equal(tensor("both").resolve_conj().resolve_neg(), expected.conj().resolve_conj().neg()));
  EXPECT_TRUE(tensor("conj").is_alias_of(base));
  EXPECT_TRUE(tensor("both").is_alias_of(base));
  EXPECT_TRUE(at::equal(tensor("transposed"), at::arange(6, at::kFloat).reshape({2, 3}).t()));
}

// Writes what was read, and reads it again.
c10::impl::GenericDict AsWeWriteIt(const c10::impl::GenericDict& root) {
  const std::string path = testing::TempDir() + "/again.pt";
  EXPECT_TRUE(RemoveTree(path).ok());
  const absl::Status written = CreateFormat("pt").value()->Write({.root = root}, path);
  EXPECT_TRUE(written.ok()) << written;
  return ReadAll(path);
}

TEST(PythonFilesTest, BytesBehindTheEndAreNamed) {
  const std::string bytes = ReadFile(Testdata("python_values.pt")).value();
  for (const size_t behind : {size_t{1}, size_t{4}, size_t{10'000}}) {
    const std::string path = absl::StrCat(testing::TempDir(), "/behind.pt");
    ASSERT_TRUE(WriteFileAtomically(path, bytes + std::string(behind, '\0')).ok());
    const absl::Status status = CreateFormat("pt").value()->Read(path).status();
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("has ", behind, " bytes behind")))
        << status;
  }
}

TEST(PythonFilesTest, PlainValues) {
  const auto plain = Below(ReadAll(Testdata("python_values.pt")), "plain");
  EXPECT_EQ(Difference(Plain(), plain), "");
  const auto lists = plain.at("lists").toListRef();
  EXPECT_TRUE(lists[0].is(lists[1]));
  c10::impl::GenericDict writable = plain.copy();
  for (const char* name : {"bytes", "bytearray"}) {  // no UTF-8
    EXPECT_EQ(writable.erase(name), 1u);
  }
  EXPECT_EQ(Difference(writable, AsWeWriteIt(writable)), "");
}

TEST(PythonFilesTest, TensorsOfAllTypes) {
  const auto tensors = Below(ReadAll(Testdata("python_values.pt")), "tensors");
  const at::Tensor counting = at::arange(6, at::kFloat).reshape({2, 3});
  EXPECT_EQ(tensors.size(), std::size(kDtypeNames));
  for (const DtypeName& dtype : kDtypeNames) {
    SCOPED_TRACE(dtype.name);
    ASSERT_TRUE(tensors.contains(std::string(dtype.name)));
    const at::Tensor read = tensors.at(std::string(dtype.name)).toTensor();
    EXPECT_EQ(read.scalar_type(), dtype.dtype);
    // Types of bits have no conversions.
    const bool counted =
        !c10::isBitsType(dtype.dtype) && dtype.dtype != c10::ScalarType::Float4_e2m1fn_x2;
    if (counted) {
      EXPECT_EQ(Difference(counting.to(dtype.dtype), read), "");
    } else {
      EXPECT_EQ(read.sizes(), c10::IntArrayRef({6}));
    }
  }
  EXPECT_EQ(Difference(tensors, AsWeWriteIt(tensors)), "");
}

TEST(PythonFilesTest, LazyConjugatesAndNegatives) {
  const auto views = Below(ReadAll(Testdata("python_values.pt")), "views");
  ExpectViews(views);
  ExpectViews(AsWeWriteIt(views));
  // In parts, too.
  const State part =
      CreateFormat("pt")
          .value()
          ->Read(Testdata("python_values.pt"), {.parts = {{"views/conj", FlatRange{1, 2}}}})
          .value();
  const at::Tensor second = part.sharded.at("views/conj").parts.at(0).tensor;
  EXPECT_FALSE(second.is_conj());
  EXPECT_EQ(second.item<c10::complex<float>>(), c10::complex<float>(3, 4));
}

TEST(PythonFilesTest, ParametersBuffersAndAttributes) {
  const auto tensors = Below(ReadAll(Testdata("python_values.pt")), "attributes");
  EXPECT_EQ(tensors.size(), 4u);
  int offset = 0;
  for (const char* name : {"parameter", "tagged", "plain", "buffer"}) {
    const at::Tensor tensor = tensors.at(name).toTensor();
    EXPECT_TRUE(at::equal(tensor, at::arange(3, at::kFloat) + offset++)) << name;
    EXPECT_FALSE(tensor.requires_grad());
  }
}

TEST(PythonFilesTest, SparseTensors) {
  const auto tensors = Below(ReadAll(Testdata("python_values.pt")), "sparse");
  const at::Tensor dense = at::tensor({0.f, 2.f, 0.f, 0.f, 3.f, 0.f, 0.f, 4.f}).reshape({2, 4});
  const std::pair<const char*, c10::Layout> layouts[] = {{"coo", at::kSparse},
                                                         {"csr", at::kSparseCsr},
                                                         {"csc", at::kSparseCsc},
                                                         {"bsr", at::kSparseBsr},
                                                         {"bsc", at::kSparseBsc}};
  for (const auto& [name, layout] : layouts) {
    const at::Tensor tensor = tensors.at(name).toTensor();
    EXPECT_EQ(tensor.layout(), layout) << name;
    EXPECT_TRUE(at::equal(tensor.to_dense(), dense)) << name;
  }
  EXPECT_TRUE(tensors.at("coo").toTensor().is_coalesced());
  const at::Tensor twice = tensors.at("uncoalesced").toTensor();
  EXPECT_FALSE(twice.is_coalesced());
  EXPECT_EQ(twice.to_dense()[0][1].item<float>(), 2);
  const absl::StatusOr<State> checked =
      CreateFormat("pt").value()->Read(Testdata("python_values.pt"), {.only_check = true});
  EXPECT_TRUE(checked.ok()) << checked.status();
  const absl::Status written =
      CreateFormat("pt").value()->Write({.root = tensors}, testing::TempDir() + "/sparse.pt");
  EXPECT_EQ(written.code(), absl::StatusCode::kInvalidArgument) << written;
}

TEST(PythonFilesTest, QuantizedTensors) {
  const std::string path = Testdata("python_quantized.pt");
  const auto tensors = ReadAll(path);
  const at::Tensor values = at::arange(-6, 6, at::kFloat).reshape({3, 4});
  const auto tensor = [&](const char* name) { return tensors.at(name).toTensor(); };
  const auto is = [](const at::Tensor& a, const at::Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.qscheme() == b.qscheme() &&
           at::equal(a.int_repr(), b.int_repr()) && at::equal(a.dequantize(), b.dequantize());
  };
  EXPECT_TRUE(is(tensor("qint8"), at::quantize_per_tensor(values, 0.5, 2, at::kQInt8)));
  EXPECT_TRUE(is(tensor("quint8"), at::quantize_per_tensor(values, 0.25, 100, at::kQUInt8)));
  EXPECT_TRUE(is(tensor("qint32"), at::quantize_per_tensor(values, 0.125, -3, at::kQInt32)));
  const at::Tensor by_channel = at::quantize_per_channel(
      values, at::tensor({0.5, 0.25, 1.0}), at::tensor({0, 1, -2}, at::kLong), 0, at::kQInt8);
  EXPECT_TRUE(is(tensor("by channel"), by_channel));
  EXPECT_TRUE(is(tensor("parameter"), by_channel));
  EXPECT_TRUE(at::equal(tensor("view").dequantize(), values.slice(0, 1).slice(1, 2)));
  const auto format = CreateFormat("pt").value();
  const absl::StatusOr<State> shapes = format->Read(path, {.meta = true});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ(shapes->root.at("by channel").toTensor().scalar_type(), at::kQInt8);
  EXPECT_TRUE(format->Read(path, {.only_check = true}).ok());
  EXPECT_TRUE(format->CheckComplete(path).ok());
  const absl::Status written =
      format->Write({.root = tensors}, testing::TempDir() + "/quantized.pt");
  EXPECT_EQ(written.code(), absl::StatusCode::kInvalidArgument) << written;
}

TEST(PythonFilesTest, LaterProtocols) {
  for (int protocol : {3, 4, 5}) {
    SCOPED_TRACE(protocol);
    const auto all = ReadAll(Testdata(absl::StrCat("python_protocol_", protocol, ".pt")));
    EXPECT_EQ(Difference(Plain(), all.at("plain")), "");
    ExpectViews(Below(all, "views"));
  }
}

TEST(PythonFilesTest, WhatThereIsNoValueForIsNamedOrLeftOut) {
  const std::string path = Testdata("python_unsupported.pt");
  const auto format = CreateFormat("pt").value();
  const absl::Status refused = format->Read(path).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(refused.message(), path)) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(),
                                "'halves of bytes' is a tensor of torch.QUInt4x2Storage"))
      << refused;
  EXPECT_EQ(format->CheckComplete(path), refused);
  EXPECT_TRUE(format->Read(path, {.parts = {{"weights", Whole{}}}}).ok());

  std::vector<std::string> left_out;
  const absl::StatusOr<State> read = format->Read(path, {.left_out = &left_out});
  ASSERT_TRUE(read.ok()) << read.status();
  const std::vector<std::string> expected = {
      "'halves of bytes' is a tensor of torch.QUInt4x2Storage",
      "'nested' is a nested tensor",
      "'meta' is a tensor on the device meta, which has no values",
      "'subclass' is a tensor of the subclass '__main__.Subclass'",
      "'set' is a set",
      "'object' refers to the Python global 'argparse.Namespace', and only plain data and tensors "
      "are read",
      "'long' is an integer of more than 64 bits",
      "'by tuple' has a key that is neither str of at most 4096 bytes, int, float nor bool",
      "'list/1' is a set",
      "'storage' is a bare storage",
      "'itself/1' is a container in itself"};
  EXPECT_EQ(left_out, expected);
  c10::impl::GenericDict rest = Any();
  rest.insert("epoch", int64_t{3});
  rest.insert("weights", at::arange(3, at::kFloat));
  c10::impl::GenericDict kept = Any();
  kept.insert("kept", int64_t{4});
  rest.insert("by tuple", kept);
  rest.insert("list", ListOf({int64_t{1}, c10::IValue(), int64_t{3}}));
  rest.insert("itself", ListOf({int64_t{1}, c10::IValue()}));
  EXPECT_EQ(Difference(rest, read->root), "");
}

TEST(PythonFilesTest, FilesWithoutChecksumsAreReadWithAWarningOrRefused) {
  const std::string path = Testdata("python_no_crc.pt");
  testing::internal::CaptureStderr();
  ExpectViews(Below(ReadAll(path), "views"));
  EXPECT_TRUE(absl::StrContains(testing::internal::GetCapturedStderr(), "has no checksums"));
  const auto strict = CreateFormat("pt", {.accept_unverified = false}).value();
  for (const absl::Status& status : {strict->Read(path).status(), strict->CheckComplete(path)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "no checksums")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  }
  EXPECT_TRUE(strict->Read(Testdata("python_protocol_3.pt")).ok());
}

TEST(PythonFilesTest, ARunsOwnFolderRefusesFilesWithoutChecksums) {
  const std::string folder = testing::TempDir() + "/unverified";
  ASSERT_TRUE(RemoveTree(folder).ok());
  const SingleRank alone;
  const auto manager = Manager::Create({.directory = folder}, alone).value();
  const std::string path = folder + "/epoch_1.pt";
  ASSERT_TRUE(WriteFileAtomically(path, ReadFile(Testdata("python_no_crc.pt")).value()).ok());
  const absl::Status status = manager->LoadNewest().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  EXPECT_TRUE(Manager::Load(path).ok());
}

TEST(PythonFilesTest, OtherFilesOfTorchAreNamed) {
  const auto expect = [](const char* name, absl::string_view what) {
    const auto format = CreateFormat("pt").value();
    const absl::Status status = format->Read(Testdata(name)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_EQ(format->CheckComplete(Testdata(name)), status);
  };
  expect("not_a_zip.pt", "before version 1.6");
  expect("not_a_dict.pt", "TorchScript");
}

}  // namespace
}  // namespace ddp::checkpoint::pt
