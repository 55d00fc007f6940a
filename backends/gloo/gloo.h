// Backend `gloo`: c10d's ProcessGroupGloo (TCP between processes; CPU tensors), with what it lacks
// (gloo_backend.h).
//
// Which network it uses, in this order: GroupOptions.interface or hostname; the environment's
// GLOO_SOCKET_IFNAME, PyTorch's variable; loopback where all ranks are on one node; otherwise the
// address this machine's host name resolves to, which must not be loopback.
#pragma once

#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "base/environment.h"

namespace ddp::backends::gloo {

// Collective. `env` is where GLOO_SOCKET_IFNAME is looked up. FailedPrecondition if several nodes
// would meet on loopback without having been told to; InvalidArgument for an unknown interface.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateGloo(const BackendOptions& options,
                                                             const Environment& env);

}  // namespace ddp::backends::gloo
