// The ranks of a backend meet at its store, and become a group of MPI.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/mpi/mpi_group.h"
#include "backends/mpi/runtime.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::mpi {

// Collective over ranks 0 … size-1, any processes of the job; the keys of `store` are theirs.
// DeadlineExceeded names who has not come within `timeout`. FailedPrecondition if two ranks are one
// process to MPI.
absl::StatusOr<std::shared_ptr<MpiGroup>> Meet(Runtime& runtime,
                                               const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size, absl::Duration timeout);

}  // namespace ddp::backends::mpi
