// Malformed and hostile pickles. The conformance suite covers round trips.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/pt/pickle_reader.h"
#include "checkpoint/pt/pickle_writer.h"

namespace ddp::checkpoint::pt {
namespace {

absl::StatusOr<c10::IValue> Read(absl::string_view body) {
  return ReadPickle(absl::StrCat("\x80\x02", body, "."),
                    [](const std::string&, uint64_t bytes) -> absl::StatusOr<c10::Storage> {
                      if (bytes > 1000) return absl::DataLossError("no such storage");
                      return at::zeros({static_cast<int64_t>(bytes)}, at::kByte).storage();
                    });
}

void ExpectRefused(absl::string_view body, absl::string_view what) {
  const absl::Status status = Read(body).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << what;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

std::string Repeat(absl::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all.append(text);
  return all;
}

// _rebuild_tensor_v2 of a FloatStorage with `elements`; numbers as opcodes.
std::string TensorOf(absl::string_view elements, absl::string_view offset, absl::string_view sizes,
                     absl::string_view strides) {
  using namespace std::string_literals;
  return absl::StrCat("ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n"s,
                      "FloatStorage\nX\x01\0\0\0"s, "0X\x03\0\0\0cpu"s, elements, "tQ", offset,
                      sizes, strides, "\x89}tR");
}

constexpr absl::string_view kMaxInt = "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f";

TEST(PickleTest, NoGlobalButTheKnownOnesIsTouched) {
  ExpectRefused("cos\nsystem\nX\x04", "'os.system'");
  ExpectRefused("cbuiltins\neval\n)R", "'builtins.eval'");
  ExpectRefused("cposix\nsy\x1bstem\n)R", "'posix.sy\\x1bstem'");
  ExpectRefused("ctorch._utils\n_rebuild_sparse_tensor\n)R", "_rebuild_sparse_tensor");
  ExpectRefused("ccollections\nOrderedDict\n(K\x01K\x02tR", "other kinds");
  ExpectRefused("ccollections\nOrderedDict\n", "as a value");
  ExpectRefused("K\x01)R", "no function");
}

TEST(PickleTest, MalformedOnesAreRefused) {
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
                                 "\x8a\x09",
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
                                 "K\x01"
                                 "b",
                                 "(K\x01tQ",
                                 "]NNs"}) {
    EXPECT_EQ(Read(body).status().code(), absl::StatusCode::kDataLoss)
        << testing::PrintToString(std::string(body));
  }
  ExpectRefused(
      "\x80\x04"
      "N",
      "protocol 4");
  ExpectRefused("}}NsN", "in the middle");
  ExpectRefused("}NNs", "dict key");
}

TEST(PickleTest, NestingAndCyclesAreBounded) {
  EXPECT_TRUE(Read(absl::StrCat(")", Repeat("\x85", 90))).ok());
  ExpectRefused(absl::StrCat(")", Repeat("\x85", 1000000)), "too deeply");
  ExpectRefused(absl::StrCat(Repeat("]", 1000000), Repeat("a", 999999)), "too deeply");
  ExpectRefused(
      "]q\x01h\x01"
      "a",
      "holds itself");
  // Deep through what was built before: each step is shallow by itself.
  std::string ladder = ")q\x01";
  for (int i = 0; i < 200; ++i) ladder += "h\x01\x85q\x01";
  ExpectRefused(absl::StrCat("(", ladder, "t"), "too deeply");
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
