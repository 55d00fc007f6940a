#include "tools/datasets/text.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

class TextTest : public testing::Test {
 protected:
  TextTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = absl::StrCat(folder_, "/", name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  template <typename T>
  std::string WriteIds(const std::string& name, const std::vector<T>& ids) {
    return Write(name,
                 std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(T)));
  }

  absl::StatusOr<Splits> Load(const TextOptions& own, int64_t train_size = 0) {
    DatasetOptions options = {.name = "text", .train_size = train_size, .context = 8};
    options.implementations.Mutable<TextOptions>("text") = own;
    return LoadText(options);
  }

  // What can be predicted of an example, and what stands before that: "abc" -> "bcd".
  struct Example {
    std::vector<int64_t> input, target;
  };
  static Example Get(const data::Dataset& dataset, int64_t index) {
    const data::Batch batch = dataset.Get({index});
    const auto* input = batch.input.const_data_ptr<int64_t>();
    const auto* target = batch.target.const_data_ptr<int64_t>();
    return {{input, input + batch.input.numel()}, {target, target + batch.target.numel()}};
  }

  const std::string folder_;
};

// Numbers 0, 1, … are tokens, so that each shows its place.
std::vector<uint32_t> Range(uint32_t n) {
  std::vector<uint32_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0u);
  return ids;
}

TEST_F(TextTest, EachTokenIsPredictedOnceFromWhatIsBeforeIt) {
  const std::string path = WriteIds("a", Range(200'000));
  const auto splits = Load({.files = {path}, .tokens = TokenType::kUint32});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->num_classes, 200'000);
  EXPECT_EQ(splits->token, "token");
  std::map<int64_t, const data::Dataset*> seen;
  for (const auto& part : {splits->train, splits->test}) {
    for (int64_t i = 0; i < part->size(); ++i) {
      const Example example = Get(*part, i);
      for (size_t k = 0; k < example.input.size(); ++k) {
        if (example.target[k] == -100) continue;
        EXPECT_EQ(example.target[k], example.input[k] + 1);
        EXPECT_TRUE(seen.emplace(example.target[k], part.get()).second);
      }
    }
  }
  // Two stretches of 4096 tokens are held out, and the first token after each boundary.
  const int64_t held_out = std::count_if(
      seen.begin(), seen.end(), [&](const auto& one) { return one.second == splits->test.get(); });
  EXPECT_EQ(held_out, 2 * 4095);
  EXPECT_EQ(seen.size(), 200'000u - 5);
  EXPECT_EQ(seen.at(19 * 4096 + 1), splits->test.get());
  EXPECT_EQ(seen.at(20 * 4096 + 1), splits->train.get());
}

TEST_F(TextTest, WhatIsNoTextOrTokensIsRefused) {
  const auto error = [&](const std::string& path, TokenType tokens) {
    return std::string(Load({.files = {path}, .tokens = tokens}).status().message());
  };
  const std::string rest(400, 'x');
  const std::string gzip = Write("a.txt.gz", "\x1f\x8b\x08x" + rest);
  for (const TokenType tokens : {TokenType::kBytes, TokenType::kUint16}) {
    EXPECT_TRUE(absl::StrContains(error(gzip, tokens), "a.txt.gz is compressed by gzip"));
  }
  const std::string numpy = Write("ids.npy", "\x93NUMPY" + rest);
  EXPECT_TRUE(absl::StrContains(error(numpy, TokenType::kUint16), "ids.npy is a NumPy file"));
  // Ids may begin with any bytes.
  EXPECT_EQ(error(Write("ids.bin", "\x1f\x8b\x08x" + rest), TokenType::kUint16), "");
}

TEST_F(TextTest, NoExampleCrossesDocumentsUnlessAsked) {
  const std::string a = Write("a.txt", "abcdefghijkl"), b = Write("b.txt", "mnopq");
  Write("c/d.txt", std::string(400, 'x'));
  Write(".hidden", "no text");
  TextOptions own = {.files = {folder_}};
  const auto apart = Load(own);
  ASSERT_TRUE(apart.ok()) << apart.status();
  EXPECT_EQ(apart->num_classes, 256);
  EXPECT_EQ(apart->token, "byte");
  const auto text = [](const std::vector<int64_t>& tokens) {
    std::string text;
    for (const int64_t token : tokens) {
      text += token == -100 ? '.' : token == 0 ? '_' : static_cast<char>(token);
    }
    return text;
  };
  const auto expect = [&](const Splits& splits, int64_t index, const std::string& input,
                          const std::string& target) {
    const Example example = Get(*splits.train, index);
    EXPECT_EQ(text(example.input), input);
    EXPECT_EQ(text(example.target), target);
  };
  expect(*apart, 0, "abcdefgh", "bcdefghi");
  expect(*apart, 1, "ijk_____", "jkl.....");
  expect(*apart, 2, "mnop____", "nopq....");
  expect(*apart, 3, "xxxxxxxx", "xxxxxxxx");
  own.cross_documents = true;
  const auto joined = Load(own);
  ASSERT_TRUE(joined.ok()) << joined.status();
  expect(*joined, 1, "ijklmnop", "jkl.nopq");
  own.cross_documents = false;
  own.separator = 'c';
  const auto separated = Load(own);
  ASSERT_TRUE(separated.ok()) << separated.status();
  expect(*separated, 0, "ab______", "bc......");
  expect(*separated, 1, "defghijk", "efghijkl");
}

TEST_F(TextTest, EveryTwentiethStretchIsHeldOut) {
  const std::string path = WriteIds("long", Range(4096 * 41));
  const auto splits = Load({.files = {path}, .tokens = TokenType::kUint32});
  ASSERT_TRUE(splits.ok()) << splits.status();
  std::set<int64_t> stretches;
  for (int64_t i = 0; i < splits->test->size(); ++i) {
    stretches.insert(Get(*splits->test, i).input[0] / 4096);
  }
  EXPECT_EQ(stretches, (std::set<int64_t>{19, 39}));
}

// A link that leads back would have it many times.
TEST_F(TextTest, AFolderIsReadOnce) {
  Write("books/new/a", std::string(2000, 'a'));
  std::filesystem::create_directory_symlink(".", folder_ + "/books/again");
  std::filesystem::create_directory_symlink("..", folder_ + "/books/new/up");
  const auto splits = Load({.files = {folder_ + "/books"}});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->train->size(), (1900 - 1 + 7) / 8);
}

// As of a disk that is not mounted.
TEST_F(TextTest, ALinkThatLeadsNowhereIsNotPassedOver) {
  Write("books/a", std::string(2000, 'a'));
  std::filesystem::create_symlink("/not/there", folder_ + "/books/b");
  const absl::Status missing = Load({.files = {folder_ + "/books"}}).status();
  EXPECT_TRUE(absl::StrContains(missing.message(), "books/b")) << missing;
}

TEST_F(TextTest, SharesOfAFewExamplesMakeUpTheWhole) {
  std::vector<std::string> files;
  for (const char* name : {"a", "b", "c"}) files.push_back(Write(name, std::string(2000, *name)));
  for (int64_t size = 1; size <= 8; ++size) {
    const auto splits = Load({.files = files, .weights = {1, 1, 1}}, size);
    ASSERT_TRUE(splits.ok()) << splits.status();
    EXPECT_EQ(splits->train->size(), size);
  }
}

TEST_F(TextTest, ShortTextIsNotFilledUpToALongContext) {
  const std::string words = Write("words", "one\ntwo\nthree\nfour\nfive\nsix\n");
  const auto splits = Load({.files = {words}, .separator = '\n', .sequence_length = 1000});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->input_shape, std::vector<int64_t>({5}));  // three\n
  const data::Batch batch = splits->train->Get({0, 2});
  EXPECT_EQ(batch.input.sizes(), at::IntArrayRef({2, 5}));
  const std::vector<int64_t> targets = {'n', 'e', '\n', -100, -100, 'h', 'r', 'e', 'e', '\n'};
  EXPECT_TRUE(at::equal(batch.target.flatten(), at::tensor(targets, at::kLong)));
}

TEST_F(TextTest, SourcesAreMixedByWeight) {
  const std::string a = WriteIds("a", std::vector<uint16_t>(801, 1));
  const std::string b = WriteIds("b", std::vector<uint16_t>(8001, 2));
  TextOptions own = {.files = {a, b}, .tokens = TokenType::kUint16, .held_out = 0.1};
  const auto count = [&](const Splits& splits) {
    std::map<int64_t, int64_t> counts;
    for (int64_t i = 0; i < splits.train->size(); ++i) ++counts[Get(*splits.train, i).input[0]];
    return counts;
  };
  const auto plain = Load(own);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(count(*plain), (std::map<int64_t, int64_t>{{1, 90}, {2, 900}}));
  own.weights = {3, 1};
  const auto mixed = Load(own);
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  EXPECT_EQ(count(*mixed), (std::map<int64_t, int64_t>{{1, 2700}, {2, 900}}));
  EXPECT_EQ(mixed->test->size(), plain->test->size());
  const auto few = Load(own, 40);
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_EQ(count(*few), (std::map<int64_t, int64_t>{{1, 30}, {2, 10}}));
}

TEST_F(TextTest, FingerprintsTellContentsAndTheirOrder) {
  const std::string a = Write("a", std::string(1 << 20, 'a')),
                    b = Write("b", std::string(1 << 20, 'b'));
  const auto print = [&](const TextOptions& own) {
    const auto splits = Load(own);
    EXPECT_TRUE(splits.ok()) << splits.status();
    EXPECT_NE(splits->train->Fingerprint(), splits->test->Fingerprint());
    return splits->train->Fingerprint();
  };
  const std::string first = print({.files = {a, b}});
  EXPECT_EQ(first.size(), 16);
  EXPECT_EQ(print({.files = {a, b}}), first);
  EXPECT_NE(print({.files = {b, a}}), first);
  EXPECT_NE(print({.files = {a, b}, .sequence_length = 7}), first);
  // Where the files are has no effect; what is in them has, also if it is as long.
  const std::string copy = Write("elsewhere/a", std::string(1 << 20, 'a'));
  EXPECT_EQ(print({.files = {copy, b}}), first);
  std::string other(1 << 20, 'a');
  std::fill(other.begin() + (1 << 19), other.end(), 'c');
  EXPECT_NE(print({.files = {Write("other", other), b}}), first);
  // Of many files too.
  for (int i = 0; i < 300; ++i) {
    Write(absl::StrCat("many/", 1000 + i), std::string(100, static_cast<char>('a' + i % 26)));
  }
  const std::string many = print({.files = {folder_ + "/many"}});
  Write("many/1000", std::string(100, 'z'));
  EXPECT_NE(print({.files = {folder_ + "/many"}}), many);
}

TEST_F(TextTest, TheVocabularyIsThatOfAllSources) {
  const std::string a = WriteIds("a", std::vector<uint16_t>(801, 700));
  const std::string b = WriteIds("b", std::vector<uint16_t>(801, 2));
  for (const std::vector<std::string>& files : {std::vector{a, b}, std::vector{b, a}}) {
    const auto splits = Load({.files = files, .tokens = TokenType::kUint16, .held_out = 0.1});
    ASSERT_TRUE(splits.ok()) << splits.status();
    EXPECT_EQ(splits->num_classes, 701);
    EXPECT_NO_THROW(splits->train->Get({0, splits->train->size() - 1}));
  }
}

TEST_F(TextTest, ErrorsNameTheOptionAndTheFile) {
  const std::string odd = Write("odd", "abc"), good = WriteIds("good", Range(3000));
  std::filesystem::create_directories(folder_ + "/empty");
  const auto expect = [&](const TextOptions& own, const std::string& message) {
    const auto splits = Load(own);
    EXPECT_FALSE(splits.ok());
    EXPECT_TRUE(absl::StrContains(splits.status().message(), message)) << splits.status();
  };
  expect({.files = {folder_ + "/none"}}, "dataset.text.files");
  expect({.files = {folder_ + "/none"}}, "/none");
  expect({.files = {folder_ + "/empty"}}, "has no files");
  expect({.files = {odd}, .tokens = TokenType::kUint16}, "odd has 3 bytes, no whole number");
  expect({.files = {odd}}, "too few for an example");
  expect({.files = {good}, .weights = {1, 2}}, "dataset.text.weights");
  for (const int64_t other : {100, 300}) {  // a model of 300 could choose what is no byte
    expect({.files = {good}, .vocab_size = other},
           absl::StrCat("dataset.text.vocab_size=", other, " must be 256"));
  }
  expect({.tokens = TokenType::kUint16}, "dataset.text.tokens=uint16");
  expect({.files = {good, good}, .weights = {1, 1e-300}},
         "dataset.text.weights=[1, 1e-300] make an");
  EXPECT_EQ(Load({.files = {good, good}, .weights = {1, 1e-300}}, 10)->train->size(), 10);
  const std::string narrow = WriteIds("narrow", std::vector<uint16_t>(3000, 0x4000));
  expect({.files = {narrow}, .tokens = TokenType::kUint32},
         absl::StrCat("finds the id 1073758208 in ", narrow, "; are its ids of 16 bits?"));
  expect({.files = {good}, .separator = 256}, "is no token: these are from 0 to 255");
  expect({.files = {good}, .tokens = TokenType::kUint32, .vocab_size = 5000, .separator = 5000},
         "from 0 to 4999");
  // Range has bytes 0, which end the "documents" of one of two files.
  const std::string words = Write("words", std::string(3000, 'a'));
  expect({.files = {words}, .separator = 0}, "dataset.text.separator=0 is no byte of ");
  EXPECT_TRUE(Load({.files = {words, good}, .separator = 0}).ok());
  DatasetOptions both = {.name = "text", .data_dir = folder_};
  both.implementations.Mutable<TextOptions>("text").files = {good};
  EXPECT_TRUE(absl::StrContains(LoadText(both).status().message(), "dataset.data_dir="));
  const absl::Status few = LoadText({.name = "text", .data_dir = odd}).status();
  EXPECT_TRUE(absl::StartsWith(few.message(), absl::StrCat("dataset.data_dir=", odd))) << few;
}

// Fewer than asked for would be taken in silence.
TEST_F(TextTest, MoreExamplesThanThereAreAreRefused) {
  const std::string a = WriteIds("a", Range(1000)), b = WriteIds("b", Range(3000));
  TextOptions own = {.files = {a, b}, .tokens = TokenType::kUint32};
  for (const std::vector<double>& weights : {std::vector<double>(), {1, 2}}) {
    own.weights = weights;
    const int64_t all = Load(own)->train->size();
    EXPECT_EQ(Load(own, all)->train->size(), all);
    const absl::Status more = Load(own, all + 1).status();
    EXPECT_TRUE(absl::StartsWith(
        more.message(), absl::StrCat("train_size=", all + 1, " must be from 0 (all) to ", all)))
        << more;
  }
  DatasetOptions options = {.name = "text", .test_size = 1000, .context = 8};
  options.implementations.Mutable<TextOptions>("text") = own;
  EXPECT_TRUE(absl::StartsWith(LoadText(options).status().message(), "test_size=1000 must be"));
}

// Also of a vocabulary that is as large as that of bytes.
TEST_F(TextTest, AnIdThatIsNotBelowTheVocabularyIsNamed) {
  const std::string path = WriteIds("good", Range(3000));
  for (const int64_t vocabulary : {2000, 256}) {
    const auto splits =
        Load({.files = {path}, .tokens = TokenType::kUint32, .vocab_size = vocabulary});
    ASSERT_TRUE(splits.ok()) << splits.status();
    EXPECT_NO_THROW(splits->train->Get({0}));
    try {
      // Tokens vocabulary - 8 to vocabulary: the last one is a target.
      splits->train->Get({vocabulary / 8 - 1});
      FAIL() << vocabulary;
    } catch (const std::exception& error) {
      EXPECT_TRUE(absl::StrContains(error.what(), absl::StrCat("good, token ", vocabulary - 1,
                                                               " or the next is ", vocabulary)))
          << error.what();
    }
  }
}

TEST_F(TextTest, TheBuiltInCorpusIsText) {
  const auto splits = LoadText({.name = "text", .context = 128});
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_GT(splits->train->size(), 9'000);
  EXPECT_GT(splits->test->size(), 400);
  const data::Batch batch = splits->train->Get({100, 101});
  EXPECT_EQ(batch.input.sizes(), at::IntArrayRef({2, 128}));
  for (const int64_t token : Get(*splits->train, 100).input) EXPECT_LT(token, 128);
}

}  // namespace
}  // namespace ddp::tools::datasets
