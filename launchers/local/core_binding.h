// Which cores each rank of a machine gets, by the machine's topology.
//
//   const std::vector<CoreShare> shares = ShareCores(/*ranks=*/2, AllowedCpus(), "/sys", cgroup);
//   // two sockets of four cores: shares[0].cpus = {0, 1, 2, 3}, shares[0].threads = 4
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddp::launchers {

struct CoreShare {
  std::vector<int> cpus;  // hardware threads, in ascending order; empty: not bound
  int threads = 1;        // that compute: one for each physical core
};

// Gives each of `ranks` ranks cores of its own, with all their hardware threads: neighbours, by
// NUMA node and socket, so that no rank is on two of them if their numbers divide evenly. The cores
// are of the CPUs in `allowed` (nullopt: all) and in the cgroup's cpuset. Nobody is bound if there
// are fewer cores than ranks, or if `quota` (of CPU time, in cores; nullopt: none) is less than
// these CPUs: then the scheduler places them, and `threads` shares the quota out.
//
// Reads SYSFS/devices/system/cpu, SYSFS/devices/system/node, and in the folder `cgroup` (version 2;
// empty: none) cpuset.cpus.effective; what is missing there limits nothing. Otherwise a pure
// function. Empty if the topology cannot be read.
std::vector<CoreShare> ShareCores(int ranks, const std::optional<std::vector<int>>& allowed,
                                  const std::string& sysfs, const std::string& cgroup,
                                  std::optional<double> quota = std::nullopt);

// Binds the calling thread, and the processes that it starts. An error leaves it as it is: binding
// is not worth a failed job. Nothing for no CPUs.
void BindTo(const std::vector<int>& cpus);

}  // namespace ddp::launchers
