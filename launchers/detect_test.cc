#include "launchers/detect.h"

#include <set>

#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

TEST(PortTest, NeighbouringJobsAndStepsDiffer) {
  std::set<int> ports;
  for (uint64_t job = 9990; job < 10040; ++job) {
    for (uint64_t step = 0; step < 100; ++step) ports.insert(PortFromJob(job, step));
  }
  EXPECT_EQ(ports.size(), 50 * 100);
}

TEST(PortTest, StaysOutsideTheEphemeralRange) {
  for (uint64_t id : {uint64_t{0}, uint64_t{1}, uint64_t{4711}, UINT64_MAX}) {
    EXPECT_GE(PortFromJob(id, id), 20000);
    EXPECT_LT(PortFromJob(id, id), 30000);
  }
}

// Ranks built at different times must agree: the values are part of the interface.
TEST(PortTest, IsFixedForAllTimes) {
  EXPECT_EQ(PortFromJob(4711, 0), 25811);
  EXPECT_EQ(PortFromJob(4711, 3), 25814);
  EXPECT_EQ(PortFromName(""), 20000 + 14695981039346656037u % 10000);
  EXPECT_EQ(PortFromName("a"), 20000 + 0xaf63dc4c8601ec8cu % 10000);  // the algorithm's test vector
  EXPECT_NE(PortFromName("1092943873"), PortFromName("1092943874"));
}

}  // namespace
}  // namespace ddp::launchers
