// Which ranks of a group share a host. Values only; no torch.
//
//   Topology t = MakeTopology({"a", "a", "b"}, /*rank=*/2);
//   t.hosts == {{0, 1}, {2}}; t.host == 1; t.local_rank == 0; t.lanes() == 1;
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddp::backends {

struct Topology {
  // The ranks of each host, ascending; hosts in the order of their first ranks. The same on all
  // ranks.
  std::vector<std::vector<int>> hosts;
  // This rank is hosts[host][local_rank].
  int host = 0;
  int local_rank = 0;

  int num_hosts() const { return static_cast<int>(hosts.size()); }
  int local_size() const { return static_cast<int>(hosts[host].size()); }
  int rank() const { return hosts[host][local_rank]; }

  // Lane i consists of the ranks with local rank i, one of each host. There are as many lanes as
  // the smallest host has ranks. Data between hosts is sent between the ranks of a lane.
  int lanes() const;
  std::vector<int> RanksOfLane(int lane) const;

  // (host, local rank) of `rank`.
  std::pair<int, int> Find(int rank) const;
};

// `host_of_rank`: a host id for each rank; `rank`: this rank.
Topology MakeTopology(const std::vector<std::string>& host_of_rank, int rank);

}  // namespace ddp::backends
