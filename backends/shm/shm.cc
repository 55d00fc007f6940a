#include "backends/backend.h"
#include "backends/shm/shm_backend.h"

namespace ddp::backends::shm {
namespace {

const Registration<BackendRegistry> kShm("shm", BackendEntry{{"cpu"},
                                                             &ShmBackend::Create,
                                                             /*available=*/nullptr});

}  // namespace
}  // namespace ddp::backends::shm
