// Agrees through MPI on the address of the ranks' store, so that MASTER_ADDR and MASTER_PORT need
// not be set.
#pragma once

#include "absl/status/statusor.h"
#include "backends/backend.h"

namespace ddp::backends::mpi {

// Collective over all ranks that mpirun started. options.rank must match their ranks in
// MPI_COMM_WORLD. Returns options.rank with master_addr and master_port set and, on rank 0, a
// listening master_listen_fd, which the caller owns.
//
// Rank 0 chooses a free port. Its address is 127.0.0.1 if all ranks are on one node; otherwise
// options.group.hostname or options.rank.master_addr if one is set; otherwise the first address of
// rank 0 (of options.group.interface, if set) that is in a network of this node.
absl::StatusOr<launchers::Rank> FindMaster(const BackendOptions& options);

}  // namespace ddp::backends::mpi
