// Detects whether another process on this host is alive, by one poll(2) on its pidfd.
//
//   store->set("peer/1", ToString(Peer::Self()));                     // rank 1
//   DDP_ASSIGN_OR_RETURN(ProcessIdentity rank1, ParseProcessIdentity(text));
//   DDP_ASSIGN_OR_RETURN(Peer peer, Peer::Open(rank1));                // rank 0
//   while (!done()) if (!peer.Alive()) return absl::UnavailableError("rank 1 has died");
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace ddp::backends {

// Identifies a process; differs from that of a later process with the same id. Valid within one
// boot and one namespace of process ids.
struct ProcessIdentity {
  pid_t pid = 0;
  // Clock ticks from boot to the start of the process (field 22 of /proc/PID/stat); 0 if unknown.
  uint64_t start_ticks = 0;

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

// "PID@TICKS", for a Store. Parsing returns InvalidArgument for any other text.
std::string ToString(const ProcessIdentity& process);
absl::StatusOr<ProcessIdentity> ParseProcessIdentity(absl::string_view text);

// A handle on a process, which may be this one (ranks as threads). Movable; owns a pidfd.
// Alive is thread-safe.
class Peer {
 public:
  // This process.
  static ProcessIdentity Self();

  // Unavailable if that process has ended, also if its id now belongs to another process;
  // ResourceExhausted if no file descriptor is left.
  static absl::StatusOr<Peer> Open(const ProcessIdentity& process);

  // False once the process has ended, whether or not its parent has waited for it (a zombie is not
  // alive). Takes about 0.3 µs; where the kernel or a seccomp filter does not allow pidfds, /proc
  // is read instead, in about 10 µs.
  bool Alive() const;

  const ProcessIdentity& process() const { return process_; }

 private:
  Peer(ProcessIdentity process, UniqueFd pidfd) : process_(process), pidfd_(std::move(pidfd)) {}

  ProcessIdentity process_;
  UniqueFd pidfd_;  // invalid: read /proc
};

}  // namespace ddp::backends
