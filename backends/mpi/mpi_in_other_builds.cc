// Backend `mpi` in builds without MPI: registers the name with an error that says what to do.

#include "absl/status/status.h"
#include "backends/backend.h"

namespace ddp::backends::mpi {
namespace {

absl::Status Refusal() {
  return absl::FailedPreconditionError(
      "backend mpi: this program was built without an MPI (no mpicc in PATH, or --define=mpi=off); "
      "install one (Debian: libopenmpi-dev and openmpi-bin), have Bazel look again (`bazel sync "
      "--configure`) and rebuild, or use backend=gloo");
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Refuse(const BackendOptions&) {
  return Refusal();
}

const Registration<BackendRegistry> kMpi("mpi", BackendEntry{{"cpu"}, &Refuse, &Refusal});

}  // namespace
}  // namespace ddp::backends::mpi
