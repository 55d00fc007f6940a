// Registers the backend `mpi`, in programs that are built with MPI.
#include "backends/backend.h"
#include "backends/mpi/master.h"
#include "backends/mpi/mpi_backend.h"
#include "backends/mpi/runtime.h"

namespace ddp::backends::mpi {
namespace {

const Registration<BackendRegistry> kMpi("mpi",
                                         BackendEntry{.device_types = {"cpu"},
                                                      .create = &CreateMpi,
                                                      .available = &StartedByMpirun,
                                                      .find_master = &FindMaster,
                                                      .capabilities = {.abort_ends_waits = true}});

}  // namespace
}  // namespace ddp::backends::mpi
