#include "backends/watch/peers.h"

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "backends/watch/door.h"

namespace ddp::backends::watch {
namespace {

// At a time; one rank must not keep a thousand others busy.
constexpr size_t kMostDoors = 32;
// At one door, when nothing but knocking is to be done.
constexpr std::chrono::milliseconds kBetweenKnocks(100);
constexpr absl::Duration kKnockPatience = absl::Milliseconds(100);
// Before a door that was never open is given up.
constexpr int kTries = 5;

}  // namespace

Peers::Peers(std::string host)
    : host_(std::move(host)), process_(shm::ToString(shm::Peer::Self())) {}

void Peers::Learn(int rank, const Report& report) {
  if (report.host != host_ && !report.door.empty() && doors_.count(rank) == 0) {
    ++doors_told_;
    Remote& remote = doors_[rank];
    // Another network's loopback is this host to us.
    const bool usable =
        report.door != kNoDoor && (!IsLoopback(report.door) || ShareNetwork(host_, report.host));
    if (usable) remote.door = report.door;
  }
  if (!known_.insert(rank).second || report.process == process_) return;
  if (report.host != host_) {
    elsewhere_.insert(rank);
    return;
  }
  const absl::StatusOr<shm::ProcessIdentity> identity = shm::ParseProcessIdentity(report.process);
  if (!identity.ok()) return;
  absl::StatusOr<shm::Peer> peer = shm::Peer::Open(*identity);
  if (peer.ok()) {
    watched_.emplace(rank, *std::move(peer));
  } else if (absl::IsUnavailable(peer.status())) {
    found_dead_.insert(rank);
  }
}

bool Peers::IsUntried(const Remote& remote) const {
  return !remote.door.empty() && !remote.was_open && remote.tries < kTries;
}

bool Peers::has_untried_doors() const {
  for (const auto& [rank, remote] : doors_) {
    if (IsUntried(remote)) return true;
  }
  return false;
}

void Peers::Knock(const std::set<int>& ranks) {
  const auto now = std::chrono::steady_clock::now();
  // In turns, from the one after the last on.
  std::vector<int> chosen;
  std::vector<std::string> addresses;
  const auto choose = [&](std::set<int>::const_iterator begin, std::set<int>::const_iterator end) {
    for (; begin != end && chosen.size() < kMostDoors; ++begin) {
      const auto found = doors_.find(*begin);
      if (found == doors_.end() || found_dead_.count(*begin) != 0) continue;
      Remote& remote = found->second;
      if (!remote.was_open && !IsUntried(remote)) continue;
      if (now - remote.tried < kBetweenKnocks) continue;
      remote.tried = now;
      chosen.push_back(*begin);
      addresses.push_back(remote.door);
    }
  };
  const auto middle = ranks.upper_bound(last_knocked_);
  choose(middle, ranks.end());
  choose(ranks.begin(), middle);
  if (chosen.empty()) return;
  last_knocked_ = chosen.back();
  const std::vector<Answer> answers = watch::Knock(addresses, kKnockPatience);
  for (size_t i = 0; i < chosen.size(); ++i) {
    Remote& remote = doors_[chosen[i]];
    ++remote.tries;
    if (answers[i] == Answer::kOpen) remote.was_open = true;
    if (answers[i] == Answer::kRefused && remote.was_open) found_dead_.insert(chosen[i]);
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
