#include "backends/common/topology.h"

#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

using Hosts = std::vector<std::vector<int>>;

TEST(TopologyTest, HostsOfDifferentSizes) {
  const Topology topology = MakeTopology({"x", "x", "x", "y"}, 2);
  EXPECT_EQ(topology.hosts, (Hosts{{0, 1, 2}, {3}}));
  EXPECT_EQ(topology.host, 0);
  EXPECT_EQ(topology.local_rank, 2);
  EXPECT_EQ(topology.local_size(), 3);
  EXPECT_EQ(topology.rank(), 2);
  EXPECT_EQ(topology.lanes(), 1);
  EXPECT_EQ(topology.RanksOfLane(0), (std::vector<int>{0, 3}));
}

TEST(TopologyTest, RanksDealtOutInTurns) {
  const Topology topology = MakeTopology({"b", "a", "b", "a"}, 3);
  EXPECT_EQ(topology.hosts, (Hosts{{0, 2}, {1, 3}}));
  EXPECT_EQ(topology.host, 1);
  EXPECT_EQ(topology.local_rank, 1);
  EXPECT_EQ(topology.lanes(), 2);
  EXPECT_EQ(topology.RanksOfLane(1), (std::vector<int>{2, 3}));
  EXPECT_EQ(topology.Find(2), (std::pair<int, int>{0, 1}));
}

}  // namespace
}  // namespace ddp::backends
