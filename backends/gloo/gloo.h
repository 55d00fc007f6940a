// Backend `gloo`: c10d's ProcessGroupGloo (TCP between processes; CPU tensors), with the additions
// of gloo_backend.h.
//
// The network, in order of precedence: GroupOptions.interface or hostname; the environment variable
// GLOO_SOCKET_IFNAME, as in PyTorch, several joined by commas included; loopback if all ranks are
// on one node; otherwise the address to which this machine's host name resolves, which must not be
// loopback.
#pragma once

#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "base/environment.h"

namespace ddp::backends::gloo {

// Collective. GLOO_SOCKET_IFNAME is read from `env`. FailedPrecondition if ranks on several nodes
// would use loopback that no option requests; OptionError for an unknown interface or host name,
// InvalidArgument for an unknown interface in GLOO_SOCKET_IFNAME, or if ranks use different numbers
// of interfaces.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateGloo(const BackendOptions& options,
                                                             const Environment& env);

}  // namespace ddp::backends::gloo
