#include "backends/common/topology.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/log/absl_check.h"

namespace ddp::backends {

int Topology::lanes() const {
  size_t smallest = hosts[0].size();
  for (const std::vector<int>& ranks : hosts) smallest = std::min(smallest, ranks.size());
  return static_cast<int>(smallest);
}

std::vector<int> Topology::RanksOfLane(int lane) const {
  std::vector<int> ranks;
  for (const std::vector<int>& of_host : hosts) ranks.push_back(of_host[lane]);
  return ranks;
}

std::pair<int, int> Topology::Find(int rank) const {
  for (int h = 0; h < num_hosts(); ++h) {
    const auto found = std::lower_bound(hosts[h].begin(), hosts[h].end(), rank);
    if (found != hosts[h].end() && *found == rank) {
      return {h, static_cast<int>(found - hosts[h].begin())};
    }
  }
  ABSL_CHECK(false) << "no rank " << rank;
}

Topology MakeTopology(const std::vector<std::string>& host_of_rank, int rank) {
  Topology topology;
  std::map<std::string, int> index;
  for (size_t r = 0; r < host_of_rank.size(); ++r) {
    const auto [found, is_new] = index.emplace(host_of_rank[r], topology.num_hosts());
    if (is_new) topology.hosts.emplace_back();
    topology.hosts[found->second].push_back(static_cast<int>(r));
  }
  std::tie(topology.host, topology.local_rank) = topology.Find(rank);
  return topology;
}

}  // namespace ddp::backends
