#include "checkpoint/pt/zip.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace ddp::checkpoint::pt {
namespace {

std::string Path(absl::string_view name) {
  return absl::StrCat(testing::TempDir(), "/zip_test_", name);
}

// Writes two records and gives the bytes of the archive.
std::string Sample() {
  const std::string path = Path("sample");
  EXPECT_TRUE(RemoveTree(path).ok());
  FileWriter file = FileWriter::Create(path).value();
  ZipWriter zip(&file);
  EXPECT_TRUE(zip.Add("a/one", "0123456789", 10).ok());
  EXPECT_TRUE(zip.Add("a/empty", nullptr, 0).ok());
  EXPECT_TRUE(zip.Finish().ok());
  EXPECT_TRUE(file.Finish().ok());
  return ReadFile(path).value();
}

absl::StatusOr<ZipReader> OpenBytes(absl::string_view bytes) {
  EXPECT_TRUE(WriteFileAtomically(Path("bytes"), bytes).ok());
  return ZipReader::Open(Path("bytes"));
}

TEST(ZipTest, RoundTripAligned) {
  const std::string bytes = Sample();
  const auto zip = OpenBytes(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  const std::vector<std::string> names = {"a/empty", "a/one"};
  EXPECT_EQ(zip->Names(), names);
  EXPECT_EQ(zip->Read("a/one").value(), "0123456789");
  EXPECT_EQ(zip->Read("a/empty").value(), "");
  EXPECT_EQ(zip->Size("a/two").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(bytes.find("0123456789") % 64, 0u);
}

TEST(ZipTest, Ranges) {
  std::string bytes = Sample();
  bytes[bytes.find("0123456789") + 9] = 'x';  // unseen by what does not read all of the record
  const auto zip = OpenBytes(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  std::string range(4, '\0');
  EXPECT_TRUE(zip->ReadRange("a/one", 3, range.data(), 4).ok());
  EXPECT_EQ(range, "3456");
  EXPECT_TRUE(zip->ReadRange("a/one", 10, range.data(), 0).ok());
  constexpr uint64_t kHuge = ~uint64_t{0};
  for (const auto& [offset, size] : {std::pair<uint64_t, uint64_t>{7, 4}, {11, 0}, {kHuge, 4}}) {
    EXPECT_EQ(zip->ReadRange("a/one", offset, range.data(), size).code(),
              absl::StatusCode::kOutOfRange)
        << offset;
  }
  EXPECT_EQ(zip->ReadRange("a/two", 0, range.data(), 0).code(), absl::StatusCode::kNotFound);
}

TEST(ZipTest, ADamagedRecordIsNamed) {
  std::string bytes = Sample();
  bytes[bytes.find("0123456789")] = 'x';
  const absl::Status status = OpenBytes(bytes)->Read("a/one").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), "record a/one does not match its CRC-32"))
      << status;
}

// As torch ends an archive of 4 GiB: the small size of its directory, and the offset in zip64's
// record alone.
TEST(ZipTest, BytesBehindALargeArchiveAreNamed) {
  std::string bytes = Sample();
  const size_t end = bytes.rfind("PK\x05\x06");
  bytes.replace(end + 12, 8, std::string("\x60\0\0\0\xff\xff\xff\xff", 8));
  const absl::Status status = OpenBytes(bytes + "abcd").status();
  EXPECT_TRUE(absl::StrContains(status.message(), "4 bytes behind the end")) << status;
}

// Sizes and offsets that would reach outside, or overflow on the way.
TEST(ZipTest, HugeNumbersAreRefused) {
  const std::string bytes = Sample();
  const size_t directory = bytes.find("PK\x01\x02");
  for (size_t at = directory; at + 8 <= bytes.size(); ++at) {
    for (uint64_t value : {~uint64_t{0}, ~uint64_t{0} >> 1, uint64_t{1} << 40, uint64_t{0xffff}}) {
      std::string damaged = bytes;
      for (int i = 0; i < 8; ++i) damaged[at + i] = static_cast<char>(value >> (8 * i));
      const auto zip = OpenBytes(damaged);
      if (!zip.ok()) continue;
      for (const std::string& name : zip->Names()) {
        const auto record = zip->Read(name);
        EXPECT_TRUE(!record.ok() || *record == "0123456789" || record->empty()) << at;
      }
    }
  }
}

}  // namespace
}  // namespace ddp::checkpoint::pt
