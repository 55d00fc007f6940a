// Which ranks of a group share a host. No torch.
//
//   Topology t = MakeTopology({"a", "a", "b"}, /*rank=*/2);
//   t.hosts == {{0, 1}, {2}}; t.host == 1; t.local_rank == 0; t.lanes() == 1;
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddp::backends::hier {

struct Topology {
  // The ranks of each host, ascending; hosts in the order of their first ranks. On all ranks the
  // same.
  std::vector<std::vector<int>> hosts;
  // Where this rank is: hosts[host][local_rank].
  int host = 0;
  int local_rank = 0;

  int num_hosts() const { return static_cast<int>(hosts.size()); }
  int local_size() const { return static_cast<int>(hosts[host].size()); }
  int rank() const { return hosts[host][local_rank]; }

  // A lane is one rank of each host, of the same local rank: lane 0 is the first rank of every
  // host, and so on, as far as the smallest host goes. What crosses hosts travels on a lane.
  int lanes() const;
  std::vector<int> RanksOfLane(int lane) const;

  // (host, local rank) of a rank.
  std::pair<int, int> Find(int rank) const;
};

// `host_of_rank` holds one text per rank; equal texts are one host.
Topology MakeTopology(const std::vector<std::string>& host_of_rank, int rank);

}  // namespace ddp::backends::hier
