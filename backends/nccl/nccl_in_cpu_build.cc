// Backend `nccl` in CPU builds: registers the name with an error that says what to do.

#include "absl/status/status.h"
#include "backends/backend.h"
#include "backends/nccl/options.h"

namespace ddp::backends::nccl {
namespace {

absl::Status Refusal() {
  return absl::FailedPreconditionError(
      "backend nccl: this program is a CPU build, without NCCL; build it with --config=cuda and "
      "run "
      "it with device=cuda on a machine with an NVIDIA GPU, or use backend=gloo");
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Refuse(const BackendOptions&) {
  return Refusal();
}

const Registration<BackendRegistry> kNccl("nccl",
                                          BackendEntry{.device_types = {"cuda"},
                                                       .create = &Refuse,
                                                       .available = &Refusal,
                                                       .options = &AnyOptions::Of<NcclOptions>});

}  // namespace
}  // namespace ddp::backends::nccl
