// Which ranks are on one host: those whose processes can share memory and watch each other.
//
//   store->set(absl::StrCat("host/", rank), HostId());
//   // Ranks with equal texts meet in one segment; the others talk over the network.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp::backends {

// Printable and without spaces; equal in two processes of one job if and only if they can share
// memory. It names, joined by '/':
//   - the boot (boot_id): one kernel, whatever its host name or address; hosts cloned from one
//     image have the same machine id and often the same name, but never the same boot;
//   - the network namespace: abstract sockets, by which the segment is handed over, end there;
//   - the process id namespace: a process id, by which peers watch each other, means nothing
//     outside it;
//   - the time namespace: it shifts the start times that tell a process from a later one of its id;
//   - the effective user: another user's socket is refused.
// So two containers on one machine are two hosts, unless they share those namespaces. User and
// mount namespaces are left out on purpose: HPC containers give each rank its own, and sharing
// memory works across them.
//
// What /proc cannot say reads "-": without boot_id the machine id and host name stand in for it,
// and a kernel without a kind of namespace has only one of it. Thread-safe; costs some system
// calls.
std::string HostId();

// Whether two hosts, as HostId() names them, have one network: containers on one machine may.
bool ShareNetwork(absl::string_view host_a, absl::string_view host_b);

namespace internal {

// HostId() with these folders in the places of /proc and /etc.
std::string HostIdFrom(absl::string_view proc, absl::string_view etc);

}  // namespace internal
}  // namespace ddp::backends
