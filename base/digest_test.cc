#include "base/digest.h"

#include <string>

#include "gtest/gtest.h"

namespace ddp {
namespace {

std::string Digest(absl::string_view bytes) {
  Digester digester;
  digester.Add(bytes);
  return digester.Hex();
}

// The expected values are the FNV draft's test vectors.
TEST(DigestTest, IsFnv1a) {
  EXPECT_EQ(Digest(""), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(Digest("a"), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(Digest("foobar"), "343e1662793c64bf6f0d3597ba446f18");
}

TEST(DigestTest, TakesAnyBytes) {
  const std::string zero(1, '\0'), high("\xff");
  EXPECT_NE(Digest(zero), Digest(""));
  EXPECT_NE(Digest(high), Digest(zero));
  EXPECT_EQ(Digest(high).size(), 32u);
}

TEST(DigestTest, PiecesMakeTheDigestOfTheWhole) {
  Digester digester;
  EXPECT_EQ(digester.Hex(), Digest(""));
  digester.Add("foo");
  digester.Add("");
  EXPECT_EQ(digester.Hex(), Digest("foo"));
  digester.Add("bar");
  EXPECT_EQ(digester.Hex(), Digest("foobar"));
}

TEST(DigestTest, FieldsHaveBoundaries) {
  const auto fields = [](absl::string_view a, absl::string_view b) {
    Digester digester;
    digester.AddField(a);
    digester.AddField(b);
    return digester.Hex();
  };
  EXPECT_NE(fields("ab", "c"), fields("a", "bc"));
  EXPECT_NE(fields("", "a"), fields("a", ""));
  EXPECT_EQ(fields("ab", "c"), fields("ab", "c"));
}

}  // namespace
}  // namespace ddp
