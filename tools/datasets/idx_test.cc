#include "tools/datasets/idx.h"

#include <zlib.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

// Three images of 1x2.
const std::string kPlain(
    "\0\0\x08\x03\0\0\0\x03\0\0\0\x01\0\0\0\x02"
    "abcdef",
    22);

std::string Gzip(const std::string& text) {
  z_stream z{};
  EXPECT_EQ(deflateInit2(&z, 9, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&z, text.size()), '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = text.size();
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = out.size();
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(out.size() - z.avail_out);
  deflateEnd(&z);
  return out;
}

std::string Write(const std::string& bytes) {
  std::string path = testing::TempDir() + "/idx_test.idx";
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

absl::StatusOr<IdxArray> Read(const std::string& bytes, int dimensions = 3) {
  return ReadIdx(Write(bytes), dimensions);
}

// The status names the path and says `reason`.
void ExpectDamaged(const std::string& bytes, const std::string& reason, int dimensions = 3) {
  const absl::Status status = Read(bytes, dimensions).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << reason;
  EXPECT_EQ(status.message(), absl::StrCat(testing::TempDir(), "/idx_test.idx: ", reason,
                                           "; fetch the original file again"));
}

TEST(IdxTest, ReadsPlainAndCompressed) {
  for (const std::string& bytes : {kPlain, Gzip(kPlain)}) {
    auto array = Read(bytes);
    ASSERT_TRUE(array.ok()) << array.status();
    EXPECT_EQ(array->sizes, std::vector<int64_t>({3, 1, 2}));
    EXPECT_EQ(std::string(array->values.begin(), array->values.end()), "abcdef");
  }
}

// As bgzip and `cat a.gz b.gz` write them.
TEST(IdxTest, ReadsSeveralMembersOfGzip) {
  const std::string first = Gzip(kPlain.substr(0, 18));
  const std::string members = first + Gzip("") + Gzip(kPlain.substr(18));
  auto array = Read(members);
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ(std::string(array->values.begin(), array->values.end()), "abcdef");
  for (size_t size = 0; size < members.size(); ++size) {
    ASSERT_EQ(Read(members.substr(0, size)).status().code(), absl::StatusCode::kDataLoss) << size;
  }
  ExpectDamaged(first, "truncated: 2 values of the 3x1x2 that its header announces");
  ExpectDamaged(members + "xyz", "there are bytes after the end of the compressed data");
  ExpectDamaged(Gzip(kPlain) + Gzip("x"),
                "there are bytes after the 3x1x2 values that its header announces");
}

TEST(IdxTest, ReadsWhatIsLongerThanItsBuffers) {
  std::string bytes("\0\0\x08\x01\0\x10\0\0", 8);
  for (int i = 0; i < 1 << 20; ++i) bytes.push_back(static_cast<char>((i * 2654435761u) >> 13));
  for (const std::string& file : {bytes, Gzip(bytes)}) {
    auto array = Read(file, 1);
    ASSERT_TRUE(array.ok()) << array.status();
    EXPECT_EQ(std::string(array->values.begin(), array->values.end()), bytes.substr(8));
  }
}

TEST(IdxTest, MissingFile) {
  const absl::Status status = ReadIdx("/nonexistent/x.gz", 3).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "/nonexistent/x.gz")) << status;
}

TEST(IdxTest, EveryTruncationIsFound) {
  const std::string gzip = Gzip(kPlain);
  for (const std::string& whole : {kPlain, gzip}) {
    for (size_t size = 0; size < whole.size(); ++size) {
      const absl::Status status = Read(whole.substr(0, size)).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << size << ": " << status;
    }
  }
  ExpectDamaged(kPlain.substr(0, 21), "truncated: 5 values of the 3x1x2 that its header announces");
  ExpectDamaged(kPlain.substr(0, 10), "truncated in the header");
  ExpectDamaged(gzip.substr(0, gzip.size() - 1), "the compressed data is truncated");
  ExpectDamaged(Gzip(kPlain.substr(0, 21)),
                "truncated: 5 values of the 3x1x2 that its header announces");
}

TEST(IdxTest, NoFlippedBitOfCompressedDataChangesAValue) {
  const std::string gzip = Gzip(kPlain);
  const absl::StatusOr<IdxArray> plain = Read(kPlain);
  ASSERT_TRUE(plain.ok()) << plain.status();
  const std::vector<uint8_t> expected(plain->values.begin(), plain->values.end());
  int harmless = 0;
  // Starts after gzip's own header of 10 bytes, of which time and system mean nothing.
  for (size_t bit = 80; bit < 8 * gzip.size(); ++bit) {
    std::string flipped = gzip;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    const auto array = Read(flipped);
    if (array.ok()) {  // one of the bits that pad the last byte
      ++harmless;
      ASSERT_EQ(std::vector<uint8_t>(array->values.begin(), array->values.end()), expected);
    } else {
      ASSERT_EQ(array.status().code(), absl::StatusCode::kDataLoss) << "bit " << bit;
    }
  }
  EXPECT_LT(harmless, 8);
  std::string checksum = gzip;
  checksum[gzip.size() - 8] ^= 1;
  ExpectDamaged(checksum, "the compressed data is corrupted (incorrect data check)");
}

TEST(IdxTest, TrailingBytesAreFound) {
  ExpectDamaged(kPlain + "x", "there are bytes after the 3x1x2 values that its header announces");
  ExpectDamaged(Gzip(kPlain + "x"),
                "there are bytes after the 3x1x2 values that its header announces");
  ExpectDamaged(Gzip(kPlain) + "x", "there are bytes after the end of the compressed data");
}

TEST(IdxTest, OtherFilesAreRefused) {
  ExpectDamaged("",
                "not an idx file of unsigned bytes in 3 dimensions: begins with [], "
                "not [0 0 8 3]");
  ExpectDamaged("hello, world",
                "not an idx file of unsigned bytes in 3 dimensions: begins with "
                "[104 101 108 108], not [0 0 8 3]");
  for (size_t byte : {0, 1}) {
    std::string magic = kPlain;
    magic[byte] = 1;
    EXPECT_EQ(Read(magic).status().code(), absl::StatusCode::kDataLoss) << byte;
  }
  std::string floats = kPlain;
  floats[2] = 0x0d;
  EXPECT_EQ(Read(floats).status().code(), absl::StatusCode::kDataLoss);
  ExpectDamaged(kPlain,
                "not an idx file of unsigned bytes in 1 dimensions: begins with [0 0 8 3], "
                "not [0 0 8 1]",
                1);
}

TEST(IdxTest, AbsurdSizesAreRefusedBeforeMemoryIsTaken) {
  const std::string huge(
      "\0\0\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
      "abc",
      19);
  const std::string reason =
      "truncated: too short for the 4294967295x4294967295x4294967295 values that its header "
      "announces";
  ExpectDamaged(huge, reason);
  ExpectDamaged(Gzip(huge), reason);
  // 2^64 values, which is 0 in 64-bit arithmetic.
  const std::string wraps("\0\0\x08\x03\x80\0\0\0\x80\0\0\0\0\0\0\x04", 16);
  ExpectDamaged(wraps,
                "truncated: too short for the 2147483648x2147483648x4 values that its header "
                "announces");
}

}  // namespace
}  // namespace ddp::tools::datasets
