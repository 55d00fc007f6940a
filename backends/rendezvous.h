// The rendezvous of the ranks of a job: connects them to one key-value store, served by rank 0.
//
//   DDP_ASSIGN_OR_RETURN(auto store, Join(rank, {.timeout = absl::Seconds(60)}));
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

struct RendezvousOptions {
  // Maximum wait for the other ranks. Finite.
  absl::Duration timeout = absl::Seconds(60);
  // This rank tells the others this text.
  std::string note = "";
};

// Collective. Rank 0 serves a c10d::TCPStore at rank.master_addr:master_port until its process ends
// (on the socket rank.master_listen_fd if a launcher has bound it; if rank.master_is_external,
// another process serves it). All ranks connect, and wait until all others have. A rank may join
// again, one call at a time: the n-th successful calls of all ranks form one rendezvous, with its
// own key prefix. DeadlineExceeded names the ranks that have not joined; Unavailable if rank 0
// cannot be reached or its port is in use; InvalidArgument if the launcher could not determine the
// address. Where rank 0 serves the store, without a wait for the timeout: InvalidArgument, with the
// exit code of wrong options, if another rank waits for a world of another size or job, and
// FailedPrecondition if another process has joined as this rank. `notes`, if not null, gets every
// rank's note, by rank.
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> Join(const launchers::Rank& rank,
                                                     const RendezvousOptions& options,
                                                     std::vector<std::string>* notes = nullptr);

}  // namespace ddp::backends
