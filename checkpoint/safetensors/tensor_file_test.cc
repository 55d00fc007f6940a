#include "checkpoint/safetensors/tensor_file.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/safetensors/header.h"

namespace ddp::checkpoint::safetensors {
namespace {

std::string Path(absl::string_view name) {
  return absl::StrCat(testing::TempDir(), "/tensor_file_test_", name);
}

// Without the syncs of WriteFileAtomically, for the tests that write many files.
void Put(const std::string& path, absl::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

std::string RandomBytes(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::string bytes;
  for (size_t i = 0; i < size; ++i) bytes.push_back(static_cast<char>(random()));
  return bytes;
}

const std::map<std::string, std::string>& Contents() {
  static const auto* const contents =
      new std::map<std::string, std::string>{{"big", RandomBytes((3 << 20) + 12)},
                                             {"block", RandomBytes(1 << 20)},
                                             {"empty", ""},
                                             {"small", "12345678"}};
  return *contents;
}

std::string Write(const std::string& path, std::map<std::string, std::string> contents) {
  EXPECT_TRUE(RemoveTree(path).ok());
  std::vector<TensorEntry> tensors;
  for (const auto& [name, bytes] : contents) {
    tensors.push_back(
        {.name = name, .dtype = Dtype::kI32, .shape = {static_cast<int64_t>(bytes.size() / 4)}});
  }
  const auto digest =
      WriteTensorFile(path, tensors, {{"format", "pt"}, {"x\"", "ddp.xxh3\":\""}},
                      [&](const TensorEntry& tensor) -> absl::StatusOr<const void*> {
                        return contents.at(tensor.name).data();
                      });
  EXPECT_TRUE(digest.ok()) << digest.status();
  return *digest;
}

TEST(TensorFileTest, WhatWasWrittenIsRead) {
  const std::string digest = Write(Path("a"), Contents());
  TensorFile file = TensorFile::Open(Path("a")).value();
  EXPECT_TRUE(file.is_verified());
  EXPECT_EQ(file.digest(), digest);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"x\"", "ddp.xxh3\":\""}}));
  EXPECT_EQ(file.Find("none"), nullptr);
  ASSERT_EQ(file.tensors().size(), Contents().size());
  for (const auto& [name, bytes] : Contents()) {
    const TensorEntry* tensor = file.Find(name);
    ASSERT_NE(tensor, nullptr) << name;
    std::string read(bytes.size(), '\0');
    ASSERT_TRUE(file.Read(*tensor, 0, read.size(), read.data()).ok()) << name;
    EXPECT_EQ(read, bytes) << name;
  }
  EXPECT_EQ(Write(Path("b"), Contents()), digest);
  EXPECT_EQ(ReadFile(Path("a")).value(), ReadFile(Path("b")).value());
}

TEST(TensorFileTest, Ranges) {
  Write(Path("a"), Contents());
  TensorFile file = TensorFile::Open(Path("a")).value();
  const TensorEntry& tensor = *file.Find("big");
  const std::string& bytes = Contents().at("big");
  std::mt19937_64 random(3);
  for (int i = 0; i < 100; ++i) {
    const uint64_t offset = random() % (bytes.size() + 1);
    const uint64_t size = random() % (bytes.size() + 1 - offset);
    std::string read(size, '\0');
    ASSERT_TRUE(file.Read(tensor, offset, size, read.data()).ok());
    ASSERT_EQ(read, bytes.substr(offset, size)) << offset << " " << size;
  }
  char none;
  EXPECT_TRUE(file.Read(tensor, bytes.size(), 0, &none).ok());
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{
           {bytes.size(), 1}, {bytes.size() + 1, 0}, {~uint64_t{0}, 1}, {1, ~uint64_t{0}}}) {
    EXPECT_EQ(file.Read(tensor, offset, size, &none).code(), absl::StatusCode::kOutOfRange);
  }
}

// Reads all tensors.
absl::Status ReadAll(const std::string& path) {
  absl::StatusOr<TensorFile> file = TensorFile::Open(path);
  if (!file.ok()) return file.status();
  if (!file->is_verified()) return absl::OkStatus();
  for (const TensorEntry& tensor : file->tensors()) {
    std::string read(tensor.size(), '\0');
    if (absl::Status status = file->Read(tensor, 0, read.size(), read.data()); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

TEST(TensorFileTest, EveryFlippedByteIsFound) {
  Write(Path("a"), {{"one", "1234"}, {"two \"x\"", "12345678"}, {"none", ""}});
  const std::string bytes = ReadFile(Path("a")).value();
  ASSERT_TRUE(ReadAll(Path("a")).ok());
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int mask : {0x01, 0x02, 0x20, 0x80, 0xff}) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ mask);
      Put(Path("flipped"), flipped);
      const absl::Status status = ReadAll(Path("flipped"));
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << at << " " << mask << ": " << status;
      ASSERT_TRUE(absl::StrContains(status.message(), Path("flipped"))) << status;
    }
  }
}

TEST(TensorFileTest, DamageIsFoundInPartsAndNamed) {
  Write(Path("a"), Contents());
  std::string bytes = ReadFile(Path("a")).value();
  const size_t at = bytes.find(Contents().at("big")) + (1 << 20) + 5;  // in its second block
  bytes[at] = static_cast<char>(bytes[at] ^ 4);
  ASSERT_TRUE(WriteFileAtomically(Path("a"), bytes).ok());
  TensorFile file = TensorFile::Open(Path("a")).value();
  const TensorEntry& tensor = *file.Find("big");
  std::string read(tensor.size(), '\0');
  EXPECT_TRUE(file.Read(tensor, 0, 1 << 20, read.data()).ok());
  EXPECT_TRUE(file.Read(tensor, 2 << 20, 1 << 20, read.data()).ok());
  EXPECT_TRUE(file.Read(*file.Find("block"), 0, 1 << 20, read.data()).ok());
  // Also where the flipped byte itself is not asked for, and again.
  for (uint64_t offset : {(1 << 20) + 100, (1 << 20) + 100, 1 << 20}) {
    const absl::Status status = file.Read(tensor, offset, 8, read.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << offset;
    EXPECT_TRUE(absl::StrContains(status.message(), "tensor 'big' does not match")) << status;
  }
}

TEST(TensorFileTest, FilesOfOthersAreUnverified) {
  std::vector<TensorEntry> tensors = {{.name = "x", .dtype = Dtype::kU8, .shape = {4}}};
  const std::string bytes = WriteHeader(tensors, {{"format", "pt"}}).value() + "data";
  ASSERT_TRUE(WriteFileAtomically(Path("foreign"), bytes).ok());
  TensorFile file = TensorFile::Open(Path("foreign")).value();
  EXPECT_FALSE(file.is_verified());
  std::string read(2, '\0');
  EXPECT_TRUE(file.Read(*file.Find("x"), 1, 2, read.data()).ok());
  EXPECT_EQ(read, "at");
  // With one metadata of ours it must have all.
  for (const char* key : {"ddp.version", "ddp.xxh3", "ddp.header_xxh3", "ddp."}) {
    const std::string half = WriteHeader(tensors, {{key, "0123456789abcdef"}}).value() + "data";
    ASSERT_TRUE(WriteFileAtomically(Path("foreign"), half).ok());
    EXPECT_EQ(TensorFile::Open(Path("foreign")).status().code(), absl::StatusCode::kDataLoss)
        << key;
  }
}

TEST(TensorFileTest, NothingIsCreatedForWhatCannotBeWritten) {
  std::vector<TensorEntry> tensors = {{.name = "__metadata__", .shape = {1}}};
  const auto give = [](const TensorEntry&) -> absl::StatusOr<const void*> { return nullptr; };
  ASSERT_TRUE(RemoveTree(Path("none")).ok());
  EXPECT_EQ(WriteTensorFile(Path("none"), tensors, {}, give).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
  tensors[0].name = "x";
  const auto fails = [](const TensorEntry&) -> absl::StatusOr<const void*> {
    return absl::AbortedError("no");
  };
  EXPECT_EQ(WriteTensorFile(Path("none"), tensors, {}, fails).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(ReadFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ddp::checkpoint::safetensors
