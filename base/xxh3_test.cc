#include "base/xxh3.h"

#include <gtest/gtest.h>

#include <string>

namespace ddp {
namespace {

TEST(Xxh3Test, IsThePublishedFunction) {
  // Of the specification's reference implementation, seed 0.
  EXPECT_EQ(HexOf(Xxh3("")), "2d06800538d394c2");
  EXPECT_EQ(Xxh3(std::string(1000, 'x')), Xxh3(std::string(1000, 'x')));
  EXPECT_NE(Xxh3(std::string(1000, 'x')), Xxh3(std::string(999, 'x')));
}

TEST(Xxh3Test, HexadecimalAndBack) {
  EXPECT_EQ(HexOf(0x0123456789abcdef), "0123456789abcdef");
  EXPECT_EQ(DigestOfHex("0123456789abcdef"), 0x0123456789abcdefU);
  EXPECT_EQ(DigestOfHex("0123456789abcde"), std::nullopt);
  EXPECT_EQ(DigestOfHex("0123456789abcdeF"), std::nullopt);
  EXPECT_EQ(DigestOfHex("0123456789abcdefa"), std::nullopt);
}

}  // namespace
}  // namespace ddp
