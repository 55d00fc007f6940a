#include "backends/watch/peers.h"

#include <utility>

#include "absl/status/statusor.h"
#include "backends/host.h"

namespace ddp::backends::watch {

Peers::Peers() : host_(HostId()), process_(shm::ToString(shm::Peer::Self())) {}

void Peers::Learn(int rank, absl::string_view host, absl::string_view process) {
  if (!known_.insert(rank).second || host != host_ || process == process_) return;
  const absl::StatusOr<shm::ProcessIdentity> identity = shm::ParseProcessIdentity(process);
  if (!identity.ok()) return;
  absl::StatusOr<shm::Peer> peer = shm::Peer::Open(*identity);
  if (peer.ok()) {
    watched_.emplace(rank, *std::move(peer));
  } else if (absl::IsUnavailable(peer.status())) {
    found_dead_.insert(rank);
  }
}

std::set<int> Peers::Dead() const {
  std::set<int> dead = found_dead_;
  for (const auto& [rank, peer] : watched_) {
    if (!peer.Alive()) dead.insert(rank);
  }
  return dead;
}

}  // namespace ddp::backends::watch
