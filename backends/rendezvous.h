// Where the ranks of a job meet: one key-value store, served by rank 0.
//
//   DDP_ASSIGN_OR_RETURN(auto store, Join(rank, {.timeout = absl::Seconds(60)}));
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

struct JoinOptions {
  // How long a rank waits for the others before it gives up and names them. Finite.
  absl::Duration timeout = absl::Seconds(60);
};

// Collective. Rank 0 serves a c10d::TCPStore at rank.master_addr:master_port (on
// rank.master_listen_fd where a launcher has bound it, and not at all where
// rank.master_is_external) until its process ends; all ranks connect and answer a roll call. A rank
// that joins again meets those that join as many times, with keys of their own; one call at a time.
// DeadlineExceeded names the ranks that never came; Unavailable if rank 0 cannot be reached or its
// port is taken; InvalidArgument if the launcher could not tell the address.
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> Join(const launchers::Rank& rank,
                                                     const JoinOptions& options);

}  // namespace ddp::backends
