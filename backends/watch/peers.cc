#include "backends/watch/peers.h"

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "backends/watch/probe.h"

namespace ddp::backends::watch {
namespace {

// Ranks per call of Probe: bounds the load that one rank causes in a large group.
constexpr size_t kMaxProbes = 32;
// Minimum time between two probes of a rank.
constexpr std::chrono::milliseconds kProbeInterval(80);
constexpr absl::Duration kProbeTimeout = absl::Milliseconds(100);
// Probes of a rank that is never found alive.
constexpr int kMaxAttempts = 5;

}  // namespace

Peers::Peers(std::string host, int rank)
    : host_(std::move(host)),
      process_(backends::ToString(backends::Peer::Self())),
      last_probed_(rank) {}

void Peers::Learn(int rank, const RankReport& report) {
  const bool is_new = known_.insert(rank).second;
  if (report.host != host_) {
    if (is_new) {
      remote_.insert(rank);
      without_address_.insert(rank);
    }
    const std::string& address = report.probe_address;
    if ((address.empty() && !report.left) || without_address_.erase(rank) == 0) return;
    // The loopback address of another network namespace is this host's own when used from here.
    const bool usable = !address.empty() && address != kNoProbeAddress &&
                        (!IsLoopback(address) || ShareNetwork(host_, report.host));
    if (usable) probeable_[rank].probe_address = address;
    return;
  }
  if (!is_new || report.process == process_) return;
  const absl::StatusOr<backends::ProcessIdentity> identity =
      backends::ParseProcessIdentity(report.process);
  if (!identity.ok()) return;
  absl::StatusOr<backends::Peer> peer = backends::Peer::Open(*identity);
  if (peer.ok()) {
    local_.emplace(rank, *std::move(peer));
  } else if (absl::IsUnavailable(peer.status())) {
    dead_when_learned_.insert(rank);
  }
}

bool Peers::IsUnverified(const Remote& remote) const {
  return !remote.was_alive && remote.attempts < kMaxAttempts;
}

std::set<int> Peers::Unverified() const {
  std::set<int> unverified;
  for (const auto& [rank, remote] : probeable_) {
    if (IsUnverified(remote)) unverified.insert(rank);
  }
  return unverified;
}

void Peers::Probe(const std::set<int>& ranks) {
  const auto now = std::chrono::steady_clock::now();
  // Round-robin: starts after the last rank of the previous call.
  std::vector<int> chosen;
  std::vector<std::string> addresses;
  const auto choose = [&](std::set<int>::const_iterator begin, std::set<int>::const_iterator end) {
    for (; begin != end && chosen.size() < kMaxProbes; ++begin) {
      const auto found = probeable_.find(*begin);
      if (found == probeable_.end() || refused_.count(*begin) != 0) continue;
      Remote& remote = found->second;
      if (!remote.was_alive && !IsUnverified(remote)) continue;
      if (now - remote.last_attempt < kProbeInterval) continue;
      remote.last_attempt = now;
      chosen.push_back(*begin);
      addresses.push_back(remote.probe_address);
    }
  };
  const auto middle = ranks.upper_bound(last_probed_);
  choose(middle, ranks.end());
  choose(ranks.begin(), middle);
  if (chosen.empty()) return;
  last_probed_ = chosen.back();
  const std::vector<ProbeResult> results = watch::Probe(addresses, kProbeTimeout);
  for (size_t i = 0; i < chosen.size(); ++i) {
    Remote& remote = probeable_[chosen[i]];
    ++remote.attempts;
    if (results[i] == ProbeResult::kAlive) remote.was_alive = true;
    if (results[i] == ProbeResult::kRefused && remote.was_alive) refused_.insert(chosen[i]);
  }
}

void Peers::MarkAlive(int rank) {
  refused_.erase(rank);
  probeable_.erase(rank);
}

std::set<int> Peers::Dead() const {
  std::set<int> dead = dead_when_learned_;
  dead.insert(refused_.begin(), refused_.end());
  for (const auto& [rank, peer] : local_) {
    if (!peer.Alive()) dead.insert(rank);
  }
  return dead;
}

}  // namespace ddp::backends::watch
