#include "ddp/tree/codec.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "ddp/tree/random_tree_testing.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

using absl::StrContains;
using testing_trees::Fingerprint;
using testing_trees::MakeRandomTree;
using testing_trees::RandomTree;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

template <typename T>
T RoundTrip(const T& value) {
  absl::StatusOr<EncodedTree> encoded = EncodeTree(value);
  if (!encoded.ok()) return ADD_FAILURE() << encoded.status(), T();
  absl::StatusOr<T> decoded = DecodeTree<T>(*encoded);
  if (!decoded.ok()) return ADD_FAILURE() << decoded.status(), T();
  return *std::move(decoded);
}

TEST(TreeCodecTest, RandomValuesKeepTheirBits) {
  size_t leaves = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const RandomTree value = MakeRandomTree(seed);
    const std::string expected = Fingerprint(value);
    EXPECT_EQ(Fingerprint(RoundTrip(value)), expected) << "seed " << seed;
    leaves += expected.size();
  }
  EXPECT_GT(leaves, 100000);  // the values are not trivial
}

TEST(TreeCodecTest, TensorsArriveContiguousDetachedAndAlone) {
  at::Tensor tensor = at::arange(6, at::kFloat).view({2, 3}).t().requires_grad_();
  const std::vector<at::Tensor> copies = RoundTrip(std::vector<at::Tensor>{tensor, tensor.conj()});
  ASSERT_EQ(copies.size(), 2);
  EXPECT_TRUE(copies[0].is_contiguous());
  EXPECT_FALSE(copies[0].requires_grad());
  EXPECT_TRUE(at::equal(copies[0], tensor));
  EXPECT_FALSE(copies[0].is_alias_of(copies[1]));
  EXPECT_EQ(copies[0].storage().nbytes(), 24);
  // conj() and imag() are views whose bits are computed on reading.
  const at::Tensor complex = at::view_as_complex(at::arange(4, at::kDouble).view({2, 2}));
  EXPECT_TRUE(at::equal(RoundTrip(complex.conj()), complex.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(RoundTrip(at::imag(complex.conj())), -at::imag(complex)));
}

TEST(TreeCodecTest, TypesOfIValuesAreKept) {
  const c10::IValue ints = RoundTrip(c10::IValue(c10::List<int64_t>({1, 2})));
  EXPECT_TRUE(ints.isIntList());
  const c10::IValue optionals =
      RoundTrip(c10::IValue(c10::List<std::optional<at::Tensor>>({at::ones({1}), std::nullopt})));
  EXPECT_TRUE(optionals.isOptionalTensorList());
  c10::Dict<std::string, c10::List<double>> dict;
  dict.insert("a", c10::List<double>({1.5}));
  const c10::IValue copy = RoundTrip(c10::IValue(dict));
  EXPECT_EQ(*copy.type(), *c10::IValue(dict).type());
  EXPECT_EQ(copy.toGenericDict().at("a").toDoubleVector(), std::vector<double>{1.5});
}

struct Scene {
  std::vector<std::map<std::string, at::Tensor>> views;
  c10::IValue extra;
};
constexpr auto FieldsOf(const Scene&) {
  return Fields(Field("views", &Scene::views), Field("extra", &Scene::extra));
}

TEST(TreeCodecTest, WhatCannotTravelIsNamedByItsPath) {
  const std::pair<at::Tensor, std::string> cases[] = {
      {at::ones({2, 2}).to_sparse(), "a Sparse tensor"},
      {at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8), "a quantized tensor"},
      {at::empty({2}, at::TensorOptions(at::kMeta)), "a tensor on device meta"},
      {at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})}), "a nested tensor"},
  };
  for (const auto& [tensor, problem] : cases) {
    Scene scene;
    scene.views = {{}, {{"fine", at::ones({1})}, {"left", tensor}}};
    const absl::Status status = EncodeTree(scene).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Message(status), "value.views[1][\"left\"] cannot be sent: it is " + problem);
  }
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("when", c10::ivalue::Tuple::create(
                          {1, c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())}));
  const absl::Status status = EncodeTree(Scene{{}, dict}).status();
  EXPECT_EQ(Message(status),
            "value.extra[\"when\"][1] cannot be sent: it is an IValue that is a Future");

  const c10::IValue devices = c10::List<c10::Device>();
  EXPECT_TRUE(StrContains(Message(EncodeTree(devices).status()), "with type Device in it"));
}

struct Chain {
  std::vector<Chain> next;
  std::vector<std::string> names;
};
constexpr auto FieldsOf(const Chain&) {
  return Fields(Field("next", &Chain::next), Field("names", &Chain::names));
}

TEST(TreeCodecTest, NestingHasALimit) {
  const auto chain = [](int length) {
    Chain chain = {{}, {"last"}};
    for (int i = 0; i < length; ++i) {
      Chain outer;
      outer.next.push_back(std::move(chain));
      chain = std::move(outer);
    }
    return chain;
  };
  EXPECT_EQ(RoundTrip(chain(kMaxTreeDepth / 2 - 1)).next.size(), 1);
  // The last name is a leaf one step below the deepest vector.
  EXPECT_EQ(RoundTrip(std::pair(1, chain(kMaxTreeDepth / 2 - 1))).second.next.size(), 1);
  EXPECT_TRUE(
      StrContains(Message(EncodeTree(chain(kMaxTreeDepth)).status()), "is nested too deeply"));
}

TEST(TreeCodecTest, ADecoderOfAnotherTypeSaysWhere) {
  const std::tuple<int, std::map<std::string, std::string>> value = {1, {{"a", "text"}}};
  const EncodedTree encoded = *EncodeTree(value);
  const auto tensors = DecodeTree<std::tuple<int, std::map<std::string, at::Tensor>>>(encoded);
  EXPECT_TRUE(StrContains(Message(tensors.status()), "value[1][\"a\"] has tag 6"))
      << tensors.status();
  const auto longs = DecodeTree<std::tuple<int64_t, std::map<std::string, std::string>>>(encoded);
  EXPECT_EQ(Message(longs.status()), "value[0] was sent as a number of another type");
  EXPECT_EQ(Message(DecodeTree<std::tuple<int>>(encoded).status()), "value has 2 members, not 1");
  EXPECT_FALSE(DecodeTree<int>(EncodedTree()).ok());
}

TEST(TreeCodecTest, DictsWithKeysThatCannotBeAreRefused) {
  c10::Dict<std::string, int64_t> dict;
  c10::List<c10::Dict<std::string, int64_t>> list;
  list.push_back(dict);
  constexpr int kNodes = 16;
  for (const auto& [value, at] :
       {std::pair(c10::IValue(dict), kNodes + 1), std::pair(c10::IValue(list), kNodes + 2)}) {
    const EncodedTree encoded = *EncodeTree(value);
    uint8_t* bytes = encoded.host.data_ptr<uint8_t>();
    ASSERT_EQ(bytes[at], 5);  // str
    bytes[at] = 7;            // None
    const absl::Status status = DecodeTree<c10::IValue>(encoded).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST(TreeCodecTest, AKeyThatIsThereTwiceIsRefused) {
  const auto message = [](const auto& value) {
    const EncodedTree encoded = *EncodeTree(value);
    uint8_t* bytes = encoded.host.data_ptr<uint8_t>();
    // The second key becomes the first.
    uint8_t* const second = std::find(bytes + 16, bytes + encoded.host.numel(), uint8_t{'z'});
    EXPECT_NE(second, bytes + encoded.host.numel());
    *second = 'y';
    return Message(DecodeTree<std::decay_t<decltype(value)>>(encoded).status());
  };
  const std::map<std::string, int64_t> map = {{"y", 1}, {"z", 2}};
  EXPECT_EQ(message(map), "value[\"y\"] is there twice");
  c10::Dict<std::string, int64_t> dict;
  dict.insert("y", 1);
  dict.insert("z", 2);
  EXPECT_EQ(message(c10::IValue(dict)), "value[\"y\"] is there twice");
}

TEST(TreeCodecTest, AByteThatIsNoBoolIsRefused) {
  for (const bool value : {false, true}) {
    const EncodedTree encoded = *EncodeTree(value);
    encoded.host.data_ptr<uint8_t>()[encoded.host.numel() - 1] = 2;
    EXPECT_EQ(Message(DecodeTree<bool>(encoded).status()), "value is no bool");
  }
}

// The encoding of one value, byte by byte: a change of the format must be deliberate.
TEST(TreeCodecTest, TheFormatIsAsDocumented) {
  const std::tuple<std::string, std::vector<int16_t>, std::optional<bool>, at::Tensor> value = {
      "ab", {1, -2}, true, at::full({1, 2}, 3, at::kInt)};
  const at::Tensor host = EncodeTree(value)->host;
  const std::vector<uint8_t> bytes(host.data_ptr<uint8_t>(),
                                   host.data_ptr<uint8_t>() + host.numel());
  const std::vector<uint8_t> expected = {
      'd',  'd',  'p', 't', 'r', 'e',  'e',  '1', 23, 0, 0, 0, 0, 0, 0, 0,  // preamble
      0x12, 4,                                                              // members
      0x06, 2,    'a', 'b',                                                 // string
      0x11, 34,   2,   1,   0,   0xfe, 0xff,                                // vector of numbers
      0x14, 0x05, 1,   1,                                                   // optional, number
      0x02, 3,    0,   2,   1,   2,                   // tensor: int, CPU, [1, 2]
      0,    0,    0,   0,   0,   0,    0,    0,   0,  // to a multiple of 16
      3,    0,    0,   0,   3,   0,    0,    0};
  EXPECT_EQ(bytes, expected);
}

// A copy that ends where memory ends, so that reading on is a crash.
class Guarded {
 public:
  explicit Guarded(const at::Tensor& bytes) {
    const size_t page = getpagesize(), size = bytes.nbytes();
    mapped_ = (size + page - 1) / page * page + page;
    memory_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    uint8_t* end = memory_ + mapped_ - page;
    mprotect(end, page, PROT_NONE);
    if (size > 0) std::memcpy(end - size, bytes.data_ptr(), size);
    tree = {.host = at::from_blob(end - size, {bytes.numel()}, at::kByte), .device = {}};
  }
  ~Guarded() { munmap(memory_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  EncodedTree tree;

 private:
  uint8_t* memory_;
  size_t mapped_;
};

// Whatever is done to the bytes, decoding ends with a value or a status.
TEST(TreeCodecTest, MutatedBytesAreRefusedOrDecoded) {
  std::mt19937_64 random(1);
  int refused = 0, decoded = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const EncodedTree good = *EncodeTree(MakeRandomTree(seed));
    const int64_t size = good.host.numel();
    for (int round = 0; round < 250; ++round) {
      EncodedTree bad = {.host = good.host.clone(), .device = {}};
      uint8_t* bytes = bad.host.data_ptr<uint8_t>();
      const int64_t at = static_cast<int64_t>(random() % size);
      switch (round % 5) {
        case 0:
          bytes[at] ^= static_cast<uint8_t>(1u << random() % 8);
          break;
        case 1:
          bytes[at] = static_cast<uint8_t>(random());
          break;
        case 2:  // lengths of up to 2^64
          for (int64_t i = at; i < std::min(size, at + 9); ++i) bytes[i] = 0xff;
          break;
        case 3:
          bad.host = bad.host.narrow(0, 0, at).clone();
          break;
        default:  // one part in the place of another
          std::memmove(bytes + at, bytes + random() % size / 2,
                       std::min<size_t>(size - at, random() % (size / 2)));
      }
      const absl::StatusOr<RandomTree> result = DecodeTree<RandomTree>(Guarded(bad.host).tree);
      if (result.ok()) {
        ++decoded;
        Fingerprint(*result);  // all of it can be read
      } else {
        ++refused;
        EXPECT_NE(result.status().code(), absl::StatusCode::kUnknown);
      }
      EXPECT_FALSE(round % 5 == 3 && result.ok());
    }
  }
  EXPECT_GT(refused, 3000);
  EXPECT_GT(decoded, 300);
}

// This includes prefixes whose header has their own length: their last node ends where memory ends.
TEST(TreeCodecTest, EveryPrefixIsRefused) {
  using Value =
      std::tuple<std::vector<std::string>, std::map<int, double>, std::vector<bool>,
                 std::optional<std::variant<int, std::vector<uint8_t>>>, at::Tensor, c10::IValue>;
  const Value value = {{"ab", ""},       {{1, 2.0}},
                       {true, false},    {{std::vector<uint8_t>{1, 2}}},
                       at::ones({0, 3}), c10::List<double>({1.5, 2.5})};
  const at::Tensor whole = EncodeTree(value)->host;
  uint64_t nodes = 0;
  std::memcpy(&nodes, whole.data_ptr<uint8_t>() + 8, 8);
  for (int64_t size = 0; size < 16 + static_cast<int64_t>(nodes); ++size) {
    const at::Tensor prefix = whole.narrow(0, 0, size).clone();
    EXPECT_FALSE(DecodeTree<Value>(Guarded(prefix).tree).ok()) << size;
    if (size < 16) continue;
    const uint64_t fewer = size - 16;
    std::memcpy(prefix.data_ptr<uint8_t>() + 8, &fewer, 8);
    EXPECT_FALSE(DecodeTree<Value>(Guarded(prefix).tree).ok()) << size;
  }
  EXPECT_TRUE(DecodeTree<Value>(Guarded(whole).tree).ok());
}

}  // namespace
}  // namespace ddp
