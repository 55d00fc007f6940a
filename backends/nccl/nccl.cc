// Backend `nccl`: c10d's ProcessGroupNCCL, in CUDA builds (--config=cuda).

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/common/join.h"
#include "backends/nccl/advice.h"
#include "backends/nccl/options.h"
#include "base/status.h"
#include "c10/cuda/CUDAFunctions.h"
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"

namespace ddp::backends::nccl {
namespace {

absl::Status Available() {
  // Returns 0, and does not throw, without a driver.
  if (c10::cuda::device_count() > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "backend nccl: this machine has no usable GPU (no device, or no driver: see nvidia-smi); use "
      "backend=gloo with device=cpu");
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateNccl(const BackendOptions& options) {
  DDP_RETURN_IF_ERROR(Available());
  const int devices = c10::cuda::device_count();
  if (options.rank.local_rank >= devices) {
    return absl::FailedPreconditionError(absl::StrCat(
        "local rank ", options.rank.local_rank, " needs a GPU of its own, but this machine has ",
        devices, "; start at most that many ranks on it (nproc_per_node)"));
  }
  // NCCL's bootstrap would wait without limit for a rank that has failed before it.
  DDP_RETURN_IF_ERROR(WaitForAllRanks(*options.store, options.rank.rank, options.rank.world_size,
                                      options.group.join_timeout));
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(options.rank.local_rank));
  const auto nccl = options.group.implementations.Get<NcclOptions>("nccl");
  auto created = CatchStatus("", [&]() -> c10::intrusive_ptr<c10d::Backend> {
    auto nccl_options = c10d::ProcessGroupNCCL::Options::create(nccl.high_priority_stream);
    nccl_options->timeout = absl::ToChronoMilliseconds(options.group.timeout);
    // Otherwise not set, so that TORCH_NCCL_USE_COMM_NONBLOCKING applies.
    if (nccl.nonblocking) nccl_options->config.blocking = 0;
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
        options.store, options.rank.rank, options.rank.world_size, nccl_options);
    // c10d would create the communicator in the first collective, and would report errors of GPUs
    // and network only there.
    backend->eagerConnectSingleDevice(device);
    return backend;
  });
  if (!created.ok()) return WithAdvice(created.status());
  return created;
}

const Registration<BackendRegistry> kNccl(
    "nccl", BackendEntry{.device_types = {"cuda"},
                         .create = &CreateNccl,
                         .available = &Available,
                         .options = &AnyOptions::Of<NcclOptions>,
                         .capabilities = {.abort_ends_waits = true, .works_can_be_polled = false}});

}  // namespace
}  // namespace ddp::backends::nccl
