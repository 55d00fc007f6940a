// Creates an MpiGroup; the ranks rendezvous through a store.
//
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group,
//                        CreateGroup(*runtime, store, rank, size, absl::Seconds(60)));
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/mpi/mpi_group.h"
#include "backends/mpi/runtime.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::mpi {

// Collective over ranks 0 … size-1, which may be any processes of the job. `store` must be used by
// this call only (PrefixStore). DeadlineExceeded names the ranks that have not joined within
// `timeout`. FailedPrecondition if two ranks are the same process for MPI.
absl::StatusOr<std::shared_ptr<MpiGroup>> CreateGroup(Runtime& runtime,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size, absl::Duration timeout);

}  // namespace ddp::backends::mpi
