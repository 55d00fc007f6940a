#include "checkpoint/crc32.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

namespace ddp::checkpoint {
namespace {

// The definition, bit by bit.
uint32_t BitByBit(const std::string& bytes) {
  uint32_t crc = 0xffffffff;
  for (char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
  }
  return ~crc;
}

std::string RandomBytes(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(Crc32Test, IsTheOneOfZipFiles) {
  EXPECT_EQ(Crc32("123456789", 9), 0xcbf43926u);  // the check value of every table of CRCs
  EXPECT_EQ(Crc32(nullptr, 0), 0u);
  EXPECT_EQ(Crc32("", 0), 0u);
}

// Long enough for each of the loops that the processor's instructions are in, at any alignment.
TEST(Crc32Test, EqualsItsDefinitionAtEveryLengthAndAlignment) {
  const std::string bytes = RandomBytes(5000, 1);
  for (size_t size = 0; size < bytes.size(); size += size < 600 ? 1 : 97) {
    for (size_t from : {0, 1, 7, 13}) {
      if (from > size) continue;
      const std::string some = bytes.substr(from, size - from);
      ASSERT_EQ(Crc32(bytes.data() + from, size - from), BitByBit(some)) << from << " " << size;
    }
  }
}

TEST(Crc32Test, PiecesCombine) {
  const std::string bytes = RandomBytes(3000, 2);
  const uint32_t whole = Crc32(bytes.data(), bytes.size());
  for (size_t cut : {0, 1, 2, 63, 64, 65, 1000, 2999, 3000}) {
    const uint32_t first = Crc32(bytes.data(), cut);
    const uint32_t second = Crc32(bytes.data() + cut, bytes.size() - cut);
    EXPECT_EQ(CombineCrc32(first, second, bytes.size() - cut), whole) << cut;
    EXPECT_EQ(Crc32(bytes.data() + cut, bytes.size() - cut, first), whole) << cut;
  }
  // More than 32 bits of length: zeros, by halves.
  uint32_t zeros = Crc32("\0", 1);
  for (uint64_t size = 1; size < uint64_t{1} << 33; size *= 2) {
    zeros = CombineCrc32(zeros, zeros, size);
    if (size == 1024) {
      const std::string twice(2048, '\0');
      EXPECT_EQ(zeros, Crc32(twice.data(), twice.size()));
    }
  }
  const uint32_t more = CombineCrc32(zeros, Crc32("x", 1), 1);
  EXPECT_EQ(CombineCrc32(zeros, CombineCrc32(zeros, Crc32("x", 1), 1), (uint64_t{1} << 33) + 1),
            CombineCrc32(CombineCrc32(zeros, zeros, uint64_t{1} << 33), Crc32("x", 1), 1));
  EXPECT_NE(more, zeros);
}

}  // namespace
}  // namespace ddp::checkpoint
