// Is that process still alive? Asked by ranks that wait for it, for the price of one poll(2).
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

// A process, told from a later one that was given the same id. Means something within one boot and
// one namespace of process ids.
struct ProcessIdentity {
  pid_t pid = 0;
  // Clock ticks from boot to the start of the process (field 22 of /proc/PID/stat); 0 if unknown.
  uint64_t start_ticks = 0;

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

// "PID@TICKS", for a Store; and back. InvalidArgument for anything else.
std::string ToString(const ProcessIdentity& process);
absl::StatusOr<ProcessIdentity> ParseProcessIdentity(absl::string_view text);

// A handle on another process, or on the own one (ranks as threads). Movable; owns a pidfd.
// Alive is thread-safe.
class Peer {
 public:
  // This process.
  static ProcessIdentity Self();

  // Unavailable if that process has ended, also where its id belongs to another by now;
  // ResourceExhausted for want of descriptors.
  static absl::StatusOr<Peer> Open(const ProcessIdentity& process);

  // False once the process has ended, waited for by its parent or not (a zombie is dead), and for
  // ever after. About 0.3 µs; where the kernel or a seccomp filter has no pidfd, /proc is read
  // instead, about 10 µs.
  bool Alive() const;

  const ProcessIdentity& process() const { return process_; }

 private:
  Peer(ProcessIdentity process, UniqueFd pidfd) : process_(process), pidfd_(std::move(pidfd)) {}

  ProcessIdentity process_;
  UniqueFd pidfd_;  // none: read /proc
};

}  // namespace ddp::backends
