// Where the ranks' store is, told by MPI: no MASTER_ADDR and no free port need be known before.
#pragma once

#include "absl/status/statusor.h"
#include "backends/backend.h"

namespace ddp::backends::mpi {

// Collective over the mpirun's ranks, which must be options.rank's. Returns options.rank with
// master_addr and master_port and, in rank 0, a listening master_listen_fd.
//
// Rank 0 takes a free port. Its address is 127.0.0.1 where all ranks are on one node; otherwise
// options.group.hostname or options.rank.master_addr where one is set; otherwise the first of rank
// 0's own (of options.group.interface, where that is set) that lies in a network of this node.
absl::StatusOr<launchers::Rank> FindMaster(const BackendOptions& options);

}  // namespace ddp::backends::mpi
