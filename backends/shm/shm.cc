#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/shm/memory/memfd.h"
#include "backends/shm/options.h"
#include "backends/shm/shm_backend.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

// Creates one page of shared memory, which some sandboxes do not allow.
absl::Status Available() {
  const absl::StatusOr<SharedMemory> page = SharedMemory::Create(4096);
  return Annotate(page.status(), "shm");
}

const Registration<BackendRegistry> kShm("shm",
                                         BackendEntry{.device_types = {"cpu"},
                                                      .create = &ShmBackend::Create,
                                                      .available = &Available,
                                                      .options = &AnyOptions::Of<ShmOptions>,
                                                      .capabilities = ShmBackend::kCapabilities});

}  // namespace
}  // namespace ddp::backends::shm
