// Malformed and hostile pickles. The conformance suite covers round trips.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/pt/pickle_reader.h"
#include "checkpoint/pt/pickle_writer.h"

namespace ddp::checkpoint::pt {
namespace {

// The value of a pickle of which `body` is what stands between the first and the last opcode.
absl::StatusOr<c10::IValue> Read(absl::string_view body, const ReadRequest& request = {}) {
  const auto load = [](const TensorSpec& tensor, const Part&,
                       const std::string&) -> absl::StatusOr<c10::IValue> {
    if (tensor.storage_bytes > 1000) return absl::DataLossError("no such storage");
    const auto bytes = static_cast<int64_t>(tensor.storage_bytes);
    return ViewOf(at::arange(bytes, at::kByte).storage(), tensor);
  };
  absl::StatusOr<Selection> selection =
      ReadPickle(absl::StrCat("\x80\x02", body, "."), request, load);
  if (!selection.ok()) return selection.status();
  return std::move(selection->value);
}

void ExpectCode(absl::StatusCode code, absl::string_view body, absl::string_view what) {
  const absl::Status status = Read(body).status();
  EXPECT_EQ(status.code(), code) << what << ": " << status;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

// Of damaged pickles.
void ExpectRefused(absl::string_view body, absl::string_view what) {
  ExpectCode(absl::StatusCode::kDataLoss, body, what);
}

// Of sound ones, with values that there are not here.
void ExpectUnsupported(absl::string_view body, absl::string_view what) {
  ExpectCode(absl::StatusCode::kUnimplemented, body, what);
}

std::string Repeat(absl::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all.append(text);
  return all;
}

// _rebuild_tensor_v2 of a storage with `elements`; numbers as opcodes. `rest` are the arguments
// from requires_grad on.
std::string TensorOf(absl::string_view elements, absl::string_view offset, absl::string_view sizes,
                     absl::string_view strides, absl::string_view storage = "FloatStorage",
                     absl::string_view rest = "\x89}") {
  using namespace std::string_literals;
  return absl::StrCat("ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n"s, storage,
                      "\nX\x01\0\0\0"s, "0X\x03\0\0\0cpu"s, elements, "tQ", offset, sizes, strides,
                      rest, "tR");
}

constexpr absl::string_view kMaxInt = "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f";

TEST(PickleTest, NoGlobalButTheKnownOnesIsTouched) {
  using namespace std::string_literals;
  ExpectUnsupported("cos\nsystem\n", "'os.system'");
  ExpectUnsupported("cos\nsystem\nX\x04\0\0\0true\x85R"s, "'os.system'");
  ExpectUnsupported("cbuiltins\neval\n)R", "'builtins.eval'");
  ExpectUnsupported("c__builtin__\neval\n)R", "'builtins.eval'");
  ExpectUnsupported("cposix\nsy\x1bstem\n)R", "'posix.sy\\x1bstem'");
  ExpectUnsupported("X\x02\0\0\0osX\x06\0\0\0system\x93)R"s, "'os.system'");
  ExpectUnsupported("cmy\nClass\n)\x81}X\x01\0\0\0aK\x01sb"s, "'my.Class'");
  ExpectUnsupported("cmy\nClass\n)}\x92", "'my.Class'");
  ExpectUnsupported("cmy\nfunction\n)R)R", "'my.function'");
  ExpectRefused("ctorch._utils\n_rebuild_sparse_tensor\n)R", "_rebuild_sparse_tensor");
  ExpectRefused("ccollections\nOrderedDict\n(K\x01K\x02tR", "other kinds");
  ExpectUnsupported("ccollections\nOrderedDict\n", "'collections.OrderedDict'");
  ExpectRefused("K\x01)R", "no function");
}

TEST(PickleTest, MalformedOnesAreRefused) {
  using namespace std::string_literals;
  for (absl::string_view body : {"",
                                 "0",
                                 "t",
                                 "\x85",
                                 "a",
                                 "e",
                                 "s",
                                 "u",
                                 "R",
                                 "b",
                                 "Q",
                                 "K",
                                 "M",
                                 "J\x01",
                                 "G\x01",
                                 "X\xff\xff\xff\xff",
                                 "h\x01",
                                 "q\x01",
                                 "(",
                                 "K\x01K\x02",
                                 "c",
                                 "cx",
                                 "cx\n",
                                 "(K\x01u",
                                 "}K\x01K\x02s.",
                                 "]K\x01K\x02s",
                                 "}(K\x01u",
                                 "(K\x01tQ",
                                 "]NNs"}) {
    EXPECT_EQ(Read(body).status().code(), absl::StatusCode::kDataLoss)
        << testing::PrintToString(std::string(body));
  }
  ExpectRefused(
      "\x80\x06"
      "N",
      "protocol 6");
  ExpectRefused("}}NsN", "in the middle");
  ExpectRefused("X\x02\0\0\0\xff\xff"s, "not UTF-8");
}

TEST(PickleTest, NestingAndCyclesAreBounded) {
  EXPECT_TRUE(Read(absl::StrCat(")", Repeat("\x85", 90))).ok());
  ExpectUnsupported(absl::StrCat(")", Repeat("\x85", 1000000)), "too deeply");
  ExpectUnsupported(absl::StrCat(Repeat("]", 1000000), Repeat("a", 999999)), "too deeply");
  ExpectUnsupported(
      "]q\x01h\x01"
      "a",
      "'0' is a container in itself");
  // Deep through what was built before: each step is shallow by itself.
  std::string ladder = ")q\x01";
  for (int i = 0; i < 200; ++i) ladder += "h\x01\x85q\x01";
  ExpectUnsupported(absl::StrCat("(", ladder, "t"), "too deeply");
  // A small pickle whose full expansion would have 2^60 leaves.
  std::string doubling = ")q\x01";
  for (int i = 0; i < 60; ++i) doubling += "h\x01h\x01\x86q\x01";
  EXPECT_TRUE(Read(absl::StrCat("(", doubling, "t")).ok());
}

TEST(PickleTest, TensorsStayWithinTheirStorage) {
  using namespace std::string_literals;
  const std::string zero = "K\0"s;
  EXPECT_TRUE(Read(TensorOf("K\x06", zero, "K\x02K\x03\x86", "K\x03K\x01\x86")).ok());
  EXPECT_TRUE(Read(TensorOf(zero, zero, zero + "\x85", "K\x01\x85")).ok());
  const absl::string_view beyond = "beyond its storage";
  ExpectRefused(TensorOf("K\x06", "K\x01", "K\x02K\x03\x86", "K\x03K\x01\x86"), beyond);
  ExpectRefused(TensorOf("K\x06", zero, "K\x07\x85", "K\x01\x85"), beyond);
  ExpectRefused(TensorOf("K\x06", zero, "K\x02\x85", "K\x06\x85"), beyond);
  ExpectRefused(TensorOf("K\x06", zero, "K\x02\x85", ")"), beyond);
  ExpectRefused(TensorOf("K\x06", kMaxInt, "K\x02\x85", "K\x01\x85"), beyond);
  ExpectRefused(TensorOf("K\x06", zero, absl::StrCat(kMaxInt, "\x85"), "K\x02\x85"), beyond);
  ExpectRefused(
      TensorOf("K\x06", zero, absl::StrCat(kMaxInt, kMaxInt, "\x86"), zero + zero + "\x86"),
      beyond);
  ExpectRefused(TensorOf("K\x06", zero, "J\xff\xff\xff\xff\x85", "K\x01\x85"), "bad size");
  ExpectRefused(TensorOf("K\x06", zero, "K\x02\x85", "J\xff\xff\xff\xff\x85"), "bad stride");
  ExpectRefused(TensorOf(kMaxInt, zero, "K\x02\x85", "K\x01\x85"), "bad storage size");
  ExpectRefused(TensorOf("J\xff\xff\xff\x7f", zero, "K\x02\x85", "K\x01\x85"), "no such storage");
}

// _rebuild_sparse_tensor of the opcodes of its arguments beside the layout.
std::string SparseOf(absl::string_view data, absl::string_view layout = "coo") {
  using namespace std::string_literals;
  const std::string name = absl::StrCat("torch.sparse_", layout);
  return absl::StrCat(
      "ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\nX",
      std::string(1, static_cast<char>(name.size())), "\0\0\0"s, name, "\x85R(", data, "ttR");
}

// Storages here hold the bytes 0, 1, 2, …, so that each index is far beyond the sizes.
TEST(PickleTest, SparseTensorsAreChecked) {
  using namespace std::string_literals;
  const std::string zero = "K\0"s;
  const std::string indices =
      TensorOf("K\x02", zero, "K\x02K\x01\x86", "K\x01K\x01\x86", "LongStorage");
  const std::string values = TensorOf("K\x01", zero, "K\x01\x85", "K\x01\x85");
  const std::string sizes = "K\x03K\x04\x86";
  ExpectRefused(SparseOf(indices + values + sizes), "a sparse tensor that torch refuses");
  ExpectRefused(SparseOf(indices + values + sizes + "\x88"), "a sparse tensor that torch refuses");
  ExpectRefused(SparseOf(indices + indices + values + sizes, "csr"), "sparse tensor that torch");
  ExpectRefused(SparseOf(indices + values + sizes, "csr"), "incomplete");
  ExpectRefused(SparseOf(indices + values + sizes, "xyz"), "unknown layout");
  ExpectRefused(SparseOf(indices + "K\x01" + sizes), "bad sparse tensor");
  ExpectRefused(SparseOf(indices + values + "J\xff\xff\xff\xff\x85"), "bad sizes");
  // 2^40 values in four bytes: it takes too long to look at all.
  const std::string expanded =
      TensorOf("K\x01", zero, "\x8a\x06\0\0\0\0\0\x01\x85"s, absl::StrCat(zero, "\x85"));
  ExpectUnsupported(expanded, "repeats its elements");
  // A GiB may be repeated, by one tensor or by several.
  const std::string half =
      TensorOf("K\x01", zero, "J\x00\x00\x00\x08\x85"s, absl::StrCat(zero, "\x85"));
  EXPECT_TRUE(Read(half).ok()) << Read(half).status();
  ExpectUnsupported(absl::StrCat("(", half, half, half, "t"), "repeats its elements");
  // Also by one that stands at several places, or what it is in.
  EXPECT_TRUE(Read(absl::StrCat("(", half, "q\x01h\x01t")).ok());
  ExpectUnsupported(absl::StrCat("(", half, "q\x01h\x01h\x01t"), "repeats its elements");
  ExpectUnsupported(absl::StrCat("(", half, "\x85q\x01h\x01h\x01t"), "repeats its elements");
  ExpectRefused(SparseOf(indices + half + sizes), "bad sparse tensor");
}

// Whoever reads a file together with other ranks lets the reader leave storages unread.
TEST(PickleTest, WhatASparseTensorIsMadeOfIsReadAtOnce) {
  using namespace std::string_literals;
  const std::string zero = "K\0"s;
  const std::string indices =
      TensorOf("K\x02", zero, "K\x01K\x02\x86", "K\x02K\x01\x86", "LongStorage");
  const std::string values = TensorOf("K\x02", zero, "K\x02\x85", "K\x01\x85");
  const std::string twice =
      absl::StrCat(SparseOf(absl::StrCat(indices, "q\0"s, values, "K\x04\x85")), "h\0\x86"s);
  at::Tensor storage;
  const auto load = [&](const TensorSpec& tensor, const Part&,
                        const std::string&) -> absl::StatusOr<c10::IValue> {
    if (tensor.dtype != at::kLong) return c10::IValue(at::ones(2));
    if (!storage.defined()) storage = at::full({2}, 1'000'000, at::kLong);  // not read
    if (tensor.used_at_once) storage.copy_(at::tensor({1, 3}, at::kLong));
    return ViewOf(storage.storage(), tensor);
  };
  const auto read = ReadPickle(absl::StrCat("\x80\x02", twice, "."), {}, load);
  ASSERT_TRUE(read.ok()) << read.status();
  const auto both = read->value.toTupleRef().elements().vec();
  EXPECT_TRUE(at::equal(both[0].toTensor().to_dense(), at::tensor({0.f, 1.f, 0.f, 1.f})));
  EXPECT_TRUE(both[1].toTensor().is_alias_of(storage));
}

TEST(PickleTest, QuantizedTensorsAreChecked) {
  using namespace std::string_literals;
  const std::string zero = "K\0"s;
  const auto quantized = [&](absl::string_view quantizer, absl::string_view sizes = "K\x02\x85",
                             absl::string_view type = "QInt8Storage",
                             absl::string_view strides = "K\x01\x85") {
    return absl::StrCat("ctorch._utils\n_rebuild_qtensor\n((X\x07\0\0\0storagectorch\n"s, type,
                        "\nX\x01\0\0\0"s, "0X\x03\0\0\0cpuK\x02tQK\0"s, sizes, strides, quantizer,
                        "\x89}tR");
  };
  const auto scheme = [](absl::string_view name) { return absl::StrCat("(ctorch\n", name, "\n"); };
  const std::string half = "G\x3f\xe0\0\0\0\0\0\0"s;  // 0.5
  const std::string per_tensor = absl::StrCat(scheme("per_tensor_affine"), half, "K\x02t");
  const auto read = Read(quantized(per_tensor));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(at::equal(read->toTensor().dequantize(), at::tensor({-1.f, -0.5f})));
  ExpectRefused(quantized(scheme("per_tensor_affine") + "t"), "a bad quantized tensor");
  ExpectRefused(quantized(scheme("per_tensor_affine") + "K\x01K\x02t"), "a bad quantized tensor");
  ExpectRefused(quantized("K\x01\x85"), "a bad quantized tensor");
  ExpectRefused(quantized(per_tensor, "K\x03\x85"), "beyond its storage");
  ExpectUnsupported(quantized(per_tensor, "\x8a\x06\0\0\0\0\0\x01\x85"s, "QInt8Storage",
                              absl::StrCat(zero, "\x85")),
                    "repeats its elements");
  ExpectUnsupported(quantized(per_tensor, "K\x02\x85", "QUInt4x2Storage"),
                    "'/' is a tensor of torch.QUInt4x2Storage");
  ExpectUnsupported(quantized(scheme("per_galaxy") + "t"), "is a tensor quantized by torch.per_g");

  const auto by_channel = [&](int channels, absl::string_view axis) {
    const std::string count = absl::StrCat("K", std::string(1, static_cast<char>(channels)));
    const std::string sizes = count + "\x85";
    return absl::StrCat(scheme("per_channel_affine"),
                        TensorOf(count, zero, sizes, "K\x01\x85", "DoubleStorage"),
                        TensorOf(count, zero, sizes, "K\x01\x85", "LongStorage"), axis, "t");
  };
  EXPECT_TRUE(Read(quantized(by_channel(2, zero))).ok())
      << Read(quantized(by_channel(2, zero))).status();
  ExpectRefused(quantized(by_channel(3, zero)), "a bad quantized tensor");
  ExpectRefused(quantized(by_channel(2, "K\x01")), "a bad quantized tensor");
  ExpectRefused(quantized(by_channel(2, "J\xff\xff\xff\xff")), "a bad quantized tensor");
}

TEST(PickleTest, MetadataOfTensors) {
  using namespace std::string_literals;
  const std::string zero = "K\0"s;
  const auto tensor = [&](absl::string_view storage, absl::string_view metadata) {
    return TensorOf("K\x02", zero, "K\x02\x85", "K\x01\x85", storage,
                    absl::StrCat("\x89}", metadata));
  };
  const std::string conj = "}X\x04\0\0\0conj\x88s"s, neg = "}X\x03\0\0\0neg\x88s"s;
  const at::Tensor read = Read(tensor("ComplexFloatStorage", conj))->toTensor();
  EXPECT_TRUE(read.is_conj());
  EXPECT_FALSE(read.is_neg());
  EXPECT_TRUE(Read(tensor("FloatStorage", neg))->toTensor().is_neg());
  EXPECT_FALSE(Read(tensor("FloatStorage", "}"))->toTensor().is_neg());
  ExpectRefused(tensor("FloatStorage", conj), "no such metadata");
  ExpectRefused(tensor("LongStorage", neg), "no such metadata");
  ExpectRefused(tensor("FloatStorage", "K\x01"), "bad metadata");
  ExpectUnsupported(tensor("FloatStorage", "}X\x03\0\0\0foo\x88s"s), "'foo'");
  ExpectRefused(tensor("FloatStorage", "NNN"), "too many arguments");
}

TEST(PickleTest, LaterProtocols) {
  using namespace std::string_literals;
  EXPECT_EQ(Read("\x80\x05\x8c\x02hi")->toStringRef(), "hi");
  EXPECT_EQ(Read("\x8d\x02\0\0\0\0\0\0\0hi"s)->toStringRef(), "hi");
  EXPECT_EQ(Read("C\x02\xff\0"s)->toStringRef(), "\xff\0"s);
  EXPECT_EQ(Read("B\x01\0\0\0\xff"s)->toStringRef(), "\xff");
  EXPECT_EQ(Read("\x96\x01\0\0\0\0\0\0\0\xff"s)->toStringRef(), "\xff");
  EXPECT_EQ(Read("\x8b\x02\0\0\0\xff\xff"s)->toInt(), -1);
  EXPECT_EQ(Read("\x95\x03\0\0\0\0\0\0\0K\x07"s)->toInt(), 7);
  ExpectRefused("\x95\x04\0\0\0\0\0\0\0K\x07"s, "cut off");
  EXPECT_EQ(Read("K\x07\x94h\0\x86"s)->toTupleRef().elements()[1].toInt(), 7);
  ExpectUnsupported("\x8f(K\x01\x90", "is a set");
  ExpectUnsupported("(K\x01\x91", "is a frozenset");
  ExpectRefused("K\x01K\x02\x93", "without a name");
  ExpectUnsupported(absl::StrCat("\x8a\x09", std::string(9, '\1')), "more than 64 bits");
}

TEST(PickleTest, Bytes) {
  using namespace std::string_literals;
  const std::string latin1 = "X\x06\0\0\0latin1"s;
  const std::string encode = "c_codecs\nencode\n";
  EXPECT_EQ(Read(encode + "X\x05\0\0\0a\xc2\x80\xc3\xbf"s + latin1 + "\x86R")->toStringRef(),
            "a\x80\xff");
  EXPECT_EQ(Read("c__builtin__\nbytes\n)R")->toStringRef(), "");
  EXPECT_EQ(Read("c__builtin__\nbytearray\nC\x01\xff\x85R")->toStringRef(), "\xff");
  ExpectRefused(encode + "X\x02\0\0\0\xc4\x80"s + latin1 + "\x86R", "no byte");
  ExpectRefused(encode + "X\x01\0\0\0aX\x05\0\0\0utf-8\x86R"s, "encoding");
  // A short pickle that asks for many long values.
  std::string many = absl::StrCat("(", encode, "q\x01X\xc8\0\0\0"s, std::string(200, 'a'), "q\x02",
                                  latin1, "q\x03");
  for (int i = 0; i < 100; ++i) many += "h\x01h\x02h\x03\x86R";
  ExpectRefused(many + "t", "again and again");
}

TEST(PickleTest, WhatHasNoValueIsLeftOutIfAskedFor) {
  using namespace std::string_literals;
  // {"a": object, "b": [object, 1], "c": {"d": {(): 1}}} with one object, which has elements.
  const std::string object = "cmy\nDict\n)\x81q\x01K\x01K\x02s(K\x03K\x04u";
  const std::string body = absl::StrCat("}(X\x01\0\0\0a"s, object, "X\x01\0\0\0b]h\x01"s, "aK\x01",
                                        "aX\x01\0\0\0c}X\x01\0\0\0d})K\x01ssu"s);
  std::vector<std::string> left_out;
  const absl::StatusOr<c10::IValue> read = Read(body, {.left_out = &left_out});
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(left_out.size(), 3u);
  EXPECT_TRUE(absl::StrContains(left_out[0], "'a' refers to the Python global 'my.Dict'"));
  EXPECT_TRUE(absl::StrContains(left_out[1], "'b/0' refers to the Python global 'my.Dict'"));
  EXPECT_TRUE(absl::StrContains(left_out[2], "'c/d' has a key"));
  const auto dict = read->toGenericDict();
  EXPECT_EQ(dict.size(), 2u);
  EXPECT_TRUE(dict.at("b").toListRef()[0].isNone());
  EXPECT_EQ(dict.at("b").toListRef()[1].toInt(), 1);
  ExpectUnsupported(body, "'a' refers to");
  EXPECT_TRUE(Read(body, {.parts = {{"b", Whole{}}}, .left_out = &left_out}).ok());
}

TEST(PickleTest, WhatStateDictsBringIsTaken) {
  using namespace std::string_literals;
  const auto with_metadata = Read("ccollections\nOrderedDict\n)Rq\x01X\x01\0\0\0aK\x07s}b"s);
  ASSERT_TRUE(with_metadata.ok()) << with_metadata.status();
  EXPECT_EQ(with_metadata->toGenericDict().at("a").toInt(), 7);
  EXPECT_EQ(Read("ctorch\nSize\n(K\x02K\x03t\x85R")->toTupleRef().elements().size(), 2u);
  EXPECT_EQ(Read("ctorch\ndevice\nX\x04\0\0\0cudaK\x01\x86R"s)->toStringRef(), "cuda:1");
  EXPECT_EQ(Read("ctorch\nbfloat16\n")->toStringRef(), "torch.bfloat16");
  EXPECT_EQ(Read("ccollections\nCounter\n}K\x05K\x01s\x85R")->toGenericDict().size(), 1u);
  EXPECT_EQ(Read("\x8a\x02\xff\xff")->toInt(), -1);
  EXPECT_EQ(Read("\x8a\0"s)->toInt(), 0);
}

// Random damage to a real pickle: an error or a value, never a crash.
TEST(PickleTest, RandomDamageNeverCrashes) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("tensor", at::zeros({3, 4}));
  dict.insert("list", c10::List<int64_t>({1, 1000, -5}));
  dict.insert("tuple", c10::ivalue::Tuple::create({c10::IValue(0.5), c10::IValue("text")}));
  const std::string whole = WritePickle(dict).value().bytes;
  const std::string body = whole.substr(2, whole.size() - 3);
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = body;
    for (size_t n = 1 + random() % 4; n > 0; --n) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) damaged.erase(random() % damaged.size(), random() % 8);
    if (!Read(damaged).ok()) ++refused;
  }
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace ddp::checkpoint::pt
