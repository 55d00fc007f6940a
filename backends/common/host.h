// Identifies the host of a process: ranks with equal ids can share memory and check each other's
// processes.
//
//   store->set(absl::StrCat("host/", rank), HostId());
//   // Ranks with equal ids use one segment; others communicate over the network.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp::backends {

// Printable and without spaces; equal in two processes of one job if and only if they can share
// memory. It names, joined by '/':
//   - the boot (boot_id): one kernel, whatever its host name or address; hosts cloned from one
//     image have the same machine id and often the same name, but never the same boot;
//   - the network namespace: the abstract sockets that pass the segment on are local to it;
//   - the process id namespace: process ids, by which peers check each other, are local to it;
//   - the time namespace: it shifts the start times by which processes of one id are told apart;
//   - the effective user: sockets of another user are refused.
// So two containers on one machine are two hosts, unless they share those namespaces. User and
// mount namespaces are left out on purpose: HPC containers give each rank its own, and sharing
// memory works across them.
//
// A part that /proc does not have is "-" (a kernel without a kind of namespace has one of it only);
// without boot_id the machine id and host name are used. Thread-safe; takes some system calls.
std::string HostId();

// Whether two hosts, given by HostId(), are in one network namespace, as containers of one machine
// can be.
bool ShareNetwork(absl::string_view host_a, absl::string_view host_b);

namespace internal {

// HostId() with these folders instead of /proc and /etc. For tests.
std::string HostIdFrom(absl::string_view proc, absl::string_view etc);

}  // namespace internal
}  // namespace ddp::backends
