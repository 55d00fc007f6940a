#include "checkpoint/safetensors/header.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"

namespace ddp::checkpoint::safetensors {
namespace {

constexpr int64_t kMost = INT64_MAX;

std::string LittleEndian(uint64_t number) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
  return bytes;
}

// The bytes that the format's own program writes for these tensors.
TEST(HeaderTest, BytesAreThoseOfTheFormat) {
  std::vector<TensorEntry> tensors = {
      {.name = "b", .dtype = Dtype::kU8, .shape = {3}},
      {.name = "a \"é\n", .dtype = Dtype::kF32, .shape = {2, 1}},
      {.name = "scalar", .dtype = Dtype::kF64, .shape = {}},
      {.name = "a", .dtype = Dtype::kF32, .shape = {0, 7}},
  };
  SortForAlignment(tensors);
  const absl::StatusOr<std::string> header = WriteHeader(tensors, {{"format", "pt"}, {"x", "\t"}});
  ASSERT_TRUE(header.ok()) << header.status();
  const std::string json =
      R"({"__metadata__":{"format":"pt","x":"\t"},)"
      R"("scalar":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[0,7],"data_offsets":[8,8]},)"
      "\"a \\\"é\\n\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[8,16]},"
      R"("b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(*header, LittleEndian(padded.size()) + padded);

  const absl::StatusOr<Header> parsed = ParseHeader(padded, 19);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->tensors.size(), 4u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(parsed->tensors[i].name, tensors[i].name);
    EXPECT_EQ(parsed->tensors[i].dtype, tensors[i].dtype);
    EXPECT_EQ(parsed->tensors[i].shape, tensors[i].shape);
    EXPECT_EQ(parsed->tensors[i].begin, tensors[i].begin);
    EXPECT_EQ(parsed->tensors[i].end, tensors[i].end);
  }
  EXPECT_EQ(parsed->metadata, (Metadata{{"format", "pt"}, {"x", "\t"}}));
}

TEST(HeaderTest, NothingInIt) {
  std::vector<TensorEntry> none;
  EXPECT_EQ(WriteHeader(none, {}).value(), LittleEndian(8) + "{}      ");
  EXPECT_TRUE(ParseHeader("{}", 0)->tensors.empty());
}

TEST(HeaderTest, EveryDtypeHasANameAndASize) {
  std::vector<std::string> all;
  std::set<absl::string_view> names;
  for (const absl::string_view name : DtypeNames()) {
    EXPECT_TRUE(names.insert(name).second) << name;
    const Dtype dtype = DtypeOfName(name).value();
    EXPECT_EQ(DtypeName(dtype), name);
    EXPECT_EQ(SizeOf(dtype, {4}).value(), static_cast<uint64_t>(BitsOf(dtype)) / 2);
    all.push_back(absl::StrCat(name, ":", BitsOf(dtype)));
  }
  EXPECT_EQ(absl::StrJoin(all, " "),
            "BOOL:8 F4:4 F6_E2M3:6 F6_E3M2:6 U8:8 I8:8 F8_E5M2:8 F8_E4M3:8 F8_E8M0:8 "
            "F8_E4M3FNUZ:8 F8_E5M2FNUZ:8 I16:16 U16:16 F16:16 BF16:16 I32:32 U32:32 F32:32 C64:64 "
            "F64:64 I64:64 U64:64");
  EXPECT_FALSE(DtypeOfName("f32").has_value());
  EXPECT_FALSE(DtypeOfName("").has_value());
}

TEST(HeaderTest, Sizes) {
  EXPECT_EQ(SizeOf(Dtype::kF32, {}).value(), 4u);
  EXPECT_EQ(SizeOf(Dtype::kF32, {0, kMost / 64}).value(), 0u);
  EXPECT_EQ(SizeOf(Dtype::kF4, {2, 3}).value(), 3u);
  EXPECT_EQ(SizeOf(Dtype::kF6E2M3, {4}).value(), 3u);
  for (const auto& [dtype, shape] : std::vector<std::pair<Dtype, std::vector<int64_t>>>{
           {Dtype::kF4, {3}},
           {Dtype::kF6E3M2, {2}},
           {Dtype::kU8, {kMost}},
           {Dtype::kU8, {kMost, kMost, kMost}},
           {Dtype::kU8, {int64_t{1} << 32, int64_t{1} << 32}},
           {Dtype::kU8, {int64_t{1} << 32, 0, int64_t{1} << 32}},
           {Dtype::kU8, {-1}},
           {Dtype::kU8, std::vector<int64_t>(65, 1)}}) {
    EXPECT_EQ(SizeOf(dtype, shape).status().code(), absl::StatusCode::kInvalidArgument)
        << absl::StrJoin(shape, ",");
  }
}

TEST(HeaderTest, WhatCannotBeWrittenIsNamed) {
  const auto refused = [](std::vector<TensorEntry> tensors, absl::string_view what,
                          const Metadata& metadata = {}) {
    const absl::Status status = WriteHeader(tensors, metadata).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  refused({{.name = "__metadata__", .shape = {1}}}, "reserves");
  refused({{.name = "x", .shape = {1}}, {.name = "x", .shape = {2}}}, "'x' is there twice");
  refused({{.name = "\xff", .shape = {1}}}, "'\\xff' is not UTF-8");
  refused({}, "is not UTF-8", {{"a", "\xc0\x80"}});
  refused({{.name = "x", .shape = {-1}}}, "tensor 'x' has a negative size");
  refused({{.name = "x", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "y", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "z", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "a", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "b", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "c", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "d", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "e", .dtype = Dtype::kU8, .shape = {kMost / 8}},
           {.name = "f", .dtype = Dtype::kU8, .shape = {kMost / 8}}},
          "tensor 'f' ends beyond");
  refused({}, "the format safetensors allows 100000000", {{"a", std::string(kMaxHeader, 'x')}});
}

// One tensor named x, of these fields.
std::string Tensor(absl::string_view dtype, absl::string_view shape, absl::string_view offsets) {
  return absl::StrCat(R"({"x":{"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)",
                      offsets, "}}");
}

void ExpectBroken(absl::string_view json, absl::string_view what, uint64_t data_size = 8) {
  const absl::Status status = ParseHeader(json, data_size).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << json << ": " << status;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << json << ": " << status;
}

TEST(HeaderTest, WhatIsNotTheFormatIsRefused) {
  ASSERT_TRUE(ParseHeader(Tensor("\"F32\"", "[2]", "[0,8]"), 8).ok());
  for (const char* text : {"", " {}", "[]", "null", "\xef\xbb\xbf{}"}) {
    ExpectBroken(text, "does not start with '{'", 0);
  }
  ExpectBroken("{", "is no JSON", 0);
  ExpectBroken("{}x", "is no JSON", 0);
  ExpectBroken(absl::string_view("{}\0", 3), "is no JSON", 0);
  ExpectBroken("{\"\xff\":1}", "is no JSON", 0);
  ExpectBroken(R"({"x":1})", "'x' has no description");
  ExpectBroken(R"({"x":{}})", "lacks one of dtype");
  ExpectBroken(R"({"x":{"dtype":"F32","shape":[2]}})", "lacks one of dtype");
  ExpectBroken(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})",
               "unknown field 'more'");
  ExpectBroken(R"({"x":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})",
               "has the key \"shape\" twice");
  ExpectBroken(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
               R"("x":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
               "has the key \"x\" twice");
  ExpectBroken(R"({"__metadata__":{"a":"b","a":"c"}})", "has the key \"a\" twice", 0);
  ExpectBroken(R"({"__metadata__":{"a":1}})", "__metadata__ 'a' is no text", 0);
  ExpectBroken(R"({"__metadata__":{"a":null}})", "__metadata__ 'a' is no text", 0);
  ExpectBroken(R"({"__metadata__":{"a":{"b":"c"}}})", "__metadata__ 'a' is no text", 0);
  ExpectBroken(R"({"__metadata__":["a"]})", "__metadata__ is no object", 0);
  ExpectBroken(R"({"__metadata__":null})", "__metadata__ is no object", 0);
  ExpectBroken(Tensor("\"f32\"", "[2]", "[0,8]"), "unknown dtype 'f32'");
  ExpectBroken(Tensor("32", "[2]", "[0,8]"), "dtype that is no text");
  ExpectBroken(Tensor("\"F32\"", "2", "[0,8]"), "shape that is no list");
  for (const char* shape : {"[-2]", "[2.0]", "[\"2\"]", "[null]", "[9223372036854775808]",
                            "[18446744073709551618]", "[-0]", "[2e0]", "[[2]]"}) {
    ExpectBroken(Tensor("\"F32\"", shape, "[0,8]"), "");
  }
  for (const char* offsets : {"8", "[0]", "[0,8,8]", "[8,0]", "[0,-8]", "[0,8.0]", "[\"0\",8]",
                              "{\"a\":0}", "[0,9223372036854775808]"}) {
    ExpectBroken(Tensor("\"F32\"", "[2]", offsets), "data_offsets");
  }
  ExpectBroken(Tensor("\"F32\"", "[2]", "[0,7]"), "has 7 bytes where its shape and dtype make 8");
  ExpectBroken(Tensor("\"F4\"", "[3]", "[0,1]"), "4 bits that do not fill whole bytes");
  ExpectBroken(Tensor("\"F32\"", "[4611686018427387904,4]", "[0,0]"), "product overflows");
  ExpectBroken(Tensor("\"F32\"", "[4611686018427387904,4,0]", "[0,0]"), "product overflows");
  ExpectBroken(Tensor("\"F32\"", absl::StrCat("[", std::string(200, '1'), "]"), "[0,8]"), "");
  ExpectBroken(Tensor(
                   "\"U8\"",
                   "[1" +
                       [] {
                         std::string ones;
                         for (int i = 0; i < 64; ++i) ones += ",1";
                         return ones;
                       }() +
                       "]",
                   "[0,1]"),
               "more than 64 items");
}

TEST(HeaderTest, EachByteBelongsToOneTensor) {
  const auto two = [](const char* a, const char* b) {
    return absl::StrCat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)", a,
                        R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)", b, "}}");
  };
  EXPECT_TRUE(ParseHeader(two("[0,4]", "[4,8]"), 8).ok());
  EXPECT_EQ(ParseHeader(two("[4,8]", "[0,4]"), 8)->tensors[0].name, "b");
  ExpectBroken(two("[0,4]", "[0,4]"), "'b' overlaps");
  ExpectBroken(two("[0,4]", "[3,7]"), "'b' overlaps");
  ExpectBroken(two("[0,4]", "[5,9]"), "'b' has a hole before it", 9);
  ExpectBroken(two("[1,5]", "[5,9]"), "'a' has a hole before it", 9);
  ExpectBroken(two("[0,4]", "[4,8]"), "has 1 bytes after its tensors", 9);
  ExpectBroken(two("[0,4]", "[4,8]"), "is cut off: its tensors need 8 bytes", 7);
  ExpectBroken("{}", "has 1 bytes after its tensors", 1);
  // Tensors without elements take no room, wherever they stand.
  EXPECT_TRUE(ParseHeader(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[4,4]},)"
                          R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                          R"("c":{"dtype":"U8","shape":[0,3],"data_offsets":[0,0]}})",
                          4)
                  .ok());
  ExpectBroken(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
               R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
               "overlaps", 4);
}

TEST(HeaderTest, DepthAndLengthAreBounded) {
  ExpectBroken("{\"x\":" + std::string(1'000'000, '['), "nested more than 3 levels");
  ExpectBroken(Tensor("\"U8\"", "[[[[1]]]]", "[0,1]"), "nested more than 3 levels");
  const auto length = [](uint64_t length, uint64_t file_size) {
    return HeaderLength(LittleEndian(length), file_size);
  };
  EXPECT_EQ(length(2, 10).value(), 2u);
  EXPECT_EQ(length(100'000'000, 100'000'008).value(), 100'000'000u);
  EXPECT_EQ(HeaderLength("", 0).status().message(), "is empty");
  for (const absl::Status& status :
       {HeaderLength("1234567", 7).status(), length(3, 10).status(),
        length(~uint64_t{0}, 10).status(), length(~uint64_t{0} - 7, 10).status(),
        length(100'000'001, 200'000'000).status(),
        length(uint64_t{1} << 63, ~uint64_t{0}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  }
}

TEST(HeaderTest, OtherProgramsFilesAreNamed) {
  const std::string path = absl::StrCat(testing::TempDir(), "/other.safetensors");
  const auto error = [&](absl::string_view contents) {
    EXPECT_TRUE(WriteFileAtomically(path, contents).ok());
    const absl::StatusOr<FileReader> file = FileReader::Open(path);
    return std::string(ReadHeader(file.value()).status().message());
  };
  EXPECT_EQ(error("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n"),
            path + " is a pointer of git LFS and not the file itself: `git lfs pull` fetches that");
  EXPECT_TRUE(absl::StrContains(error("<!DOCTYPE html><html>404"), "is an HTML page")) << path;
  EXPECT_TRUE(absl::StrContains(error("PK\3\4 archive/data.pkl"), "a zip archive")) << path;
}

TEST(HeaderTest, FilesAreReadAndNamed) {
  const std::string path = absl::StrCat(testing::TempDir(), "/header_test.safetensors");
  std::vector<TensorEntry> tensors = {{.name = "x", .dtype = Dtype::kU8, .shape = {4}}};
  const std::string bytes = WriteHeader(tensors, {}).value() + "data";
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
  const Header header = ReadHeader(FileReader::Open(path).value()).value();
  EXPECT_EQ(header.data_begin, bytes.size() - 4);
  for (size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_TRUE(WriteFileAtomically(path, bytes.substr(0, size)).ok());
    const absl::Status status = ReadHeader(FileReader::Open(path).value()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << size << ": " << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), path + " ")) << status;
  }
}

}  // namespace
}  // namespace ddp::checkpoint::safetensors
