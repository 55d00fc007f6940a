#include "checkpoint/foreign.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint {
namespace {

using std::string_literals::operator""s;

std::string Describe(const std::string& file) {
  return DescribeForeign(absl::string_view(file).substr(0, kForeignHead), file.size());
}

TEST(ForeignTest, WhatPeoplePassByMistakeIsNamed) {
  const auto expect = [](const std::string& file, absl::string_view what) {
    EXPECT_TRUE(absl::StrContains(Describe(file), what)) << Describe(file) << " for " << what;
  };
  expect("", "is empty");
  expect("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n", "git LFS");
  expect("<!DOCTYPE html><html>", "HTML");
  expect("\n  <HTML lang=\"en\">", "HTML");
  expect("\x1f\x8b\x08\0"s, "gzip");
  expect("\x28\xb5\x2f\xfd\x24"s, "zstd");
  expect("\x93NUMPY\x01\0"s, "numpy");
  expect("\x89HDF\r\n\x1a\n"s, "HDF5");
  expect("\x08\0\0\0\0\0\0\0{\"a\":{}}"s, "safetensors");
  expect("\x80\x02\x8a\x0alz", "bare pickle");
  // Both protocols, as torch.save(…, _use_new_zipfile_serialization=False) begins.
  expect("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03."s,
         "before version 1.6");
  expect("\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x04"s,
         "before version 1.6");
  expect(std::string(257, 'x') + "ustar\0"s, "tar");
  expect("{\"epoch\": 3}", "JSON");
}

TEST(ForeignTest, TheRestIsNot) {
  for (const std::string& file :
       {"x"s, "PK\x03\x04"s, "<xml>"s, "\x08"s, std::string(600, '\0'),
        "\xff\xff\xff\xff\xff\xff\xff\xff{"s /* no such header fits into the file */}) {
    EXPECT_EQ(Describe(file), "");
  }
}

TEST(ForeignTest, AReasonOfNoSuchFormatIsKnownAsSuch) {
  EXPECT_TRUE(IsOfNoSuchFormat(OfNoSuchFormat("a is no such file")));
  EXPECT_EQ(OfNoSuchFormat("a is no such file").code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(IsOfNoSuchFormat(absl::DataLossError("a is cut off")));
  EXPECT_FALSE(IsOfNoSuchFormat(absl::OkStatus()));
}

}  // namespace
}  // namespace ddp::checkpoint
