#include "backends/hier/link.h"

#include <vector>

#include "gtest/gtest.h"

namespace ddp::backends::hier {
namespace {

TEST(LinkTest, AgreesOftenAtFirstThenSeldom) {
  Link link(Packing::kAuto);
  std::vector<int> due;
  for (int i = 1; i <= 1024; ++i) {
    link.Record(1, absl::Seconds(1));
    if (link.due()) due.push_back(i);
  }
  EXPECT_EQ(due, (std::vector<int>{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024}));
}

TEST(LinkTest, IsSlowWhereTheSlowestRankSaysSo) {
  Link link(Packing::kAuto);
  EXPECT_FALSE(link.slow());
  EXPECT_FALSE(link.packs());
  // One of them has waited for somebody.
  link.Record(25'000'000, absl::Seconds(1));
  link.Record(25'000'000, absl::Milliseconds(50));
  EXPECT_DOUBLE_EQ(link.bytes_per_s(), 500e6);
  link.Agree(119e6);  // another rank's
  EXPECT_TRUE(link.slow());
  EXPECT_TRUE(link.packs());
  // What was before the agreement is forgotten.
  link.Record(25'000'000, absl::Milliseconds(100));
  EXPECT_DOUBLE_EQ(link.bytes_per_s(), 250e6);
  link.Agree(250e6);
  EXPECT_FALSE(link.slow());
}

TEST(LinkTest, PackingCanBeChosen) {
  Link never(Packing::kNever), always(Packing::kAlways);
  never.Agree(1e6);
  EXPECT_FALSE(never.packs());
  always.Agree(1e9);
  EXPECT_TRUE(always.packs());
}

}  // namespace
}  // namespace ddp::backends::hier
