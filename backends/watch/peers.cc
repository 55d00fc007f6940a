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
constexpr std::chrono::milliseconds kBetweenKnocks(80);
constexpr absl::Duration kKnockPatience = absl::Milliseconds(100);
// Before a door that was never open is given up.
constexpr int kTries = 5;

}  // namespace

Peers::Peers(std::string host, int rank)
    : host_(std::move(host)),
      process_(backends::ToString(backends::Peer::Self())),
      last_knocked_(rank) {}

void Peers::Learn(int rank, const Report& report) {
  const bool is_new = known_.insert(rank).second;
  if (report.host != host_) {
    if (is_new) {
      elsewhere_.insert(rank);
      untold_.insert(rank);
    }
    if ((report.door.empty() && !report.left) || untold_.erase(rank) == 0) return;
    // Another network's loopback is this host to us.
    const bool usable = !report.door.empty() && report.door != kNoDoor &&
                        (!IsLoopback(report.door) || ShareNetwork(host_, report.host));
    if (usable) doors_[rank].door = report.door;
    return;
  }
  if (!is_new || report.process == process_) return;
  const absl::StatusOr<backends::ProcessIdentity> identity =
      backends::ParseProcessIdentity(report.process);
  if (!identity.ok()) return;
  absl::StatusOr<backends::Peer> peer = backends::Peer::Open(*identity);
  if (peer.ok()) {
    watched_.emplace(rank, *std::move(peer));
  } else if (absl::IsUnavailable(peer.status())) {
    found_dead_.insert(rank);
  }
}

bool Peers::IsUntried(const Remote& remote) const {
  return !remote.was_open && remote.tries < kTries;
}

std::set<int> Peers::Untried() const {
  std::set<int> untried;
  for (const auto& [rank, remote] : doors_) {
    if (IsUntried(remote)) untried.insert(rank);
  }
  return untried;
}

void Peers::Knock(const std::set<int>& ranks) {
  const auto now = std::chrono::steady_clock::now();
  // In turns, from the one after the last on.
  std::vector<int> chosen;
  std::vector<std::string> addresses;
  const auto choose = [&](std::set<int>::const_iterator begin, std::set<int>::const_iterator end) {
    for (; begin != end && chosen.size() < kMostDoors; ++begin) {
      const auto found = doors_.find(*begin);
      if (found == doors_.end() || shut_.count(*begin) != 0) continue;
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
    if (answers[i] == Answer::kRefused && remote.was_open) shut_.insert(chosen[i]);
  }
}

void Peers::Vouch(int rank) {
  shut_.erase(rank);
  doors_.erase(rank);
}

std::set<int> Peers::Dead() const {
  std::set<int> dead = found_dead_;
  dead.insert(shut_.begin(), shut_.end());
  for (const auto& [rank, peer] : watched_) {
    if (!peer.Alive()) dead.insert(rank);
  }
  return dead;
}

}  // namespace ddp::backends::watch
