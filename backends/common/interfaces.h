// The network interfaces that a user has chosen for backends over TCP.
//
//   for (const std::string& name : ChosenInterfaces(group.interface, group.hostname, env)) …
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/environment.h"

namespace ddp::backends {

// PyTorch's variable, which all of these backends follow.
inline constexpr char kInterfaceVariable[] = "GLOO_SOCKET_IFNAME";

// The names in `interface`, the option of that name; if it is empty, and `hostname`, too, those in
// the variable. Several are joined by commas, with or without spaces; a name that is missing
// between them is an empty one. Empty: none are chosen. Thread-safe.
std::vector<std::string> ChosenInterfaces(absl::string_view interface, absl::string_view hostname,
                                          const Environment& env);

}  // namespace ddp::backends
