#include "backends/watch/progress_checks.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"

namespace ddp::backends::watch {
namespace {

// Age of a collective at which the ranks compare their calls.
constexpr absl::Duration kCompareAfter = absl::Seconds(1);
// Grace period for collectives after a rank's process has ended: it may have done its part.
constexpr absl::Duration kDeathGracePeriod = absl::Milliseconds(100);
// Maximum wait for the answers of the others then: the dead rank is known, and the error must come
// within half a second.
constexpr absl::Duration kDeathReplyTimeout = absl::Milliseconds(50);

}  // namespace

ProgressChecks::ProgressChecks(const WatchdogOptions& options, CallHistory& history,
                               GroupState& state, const LivenessMonitor& liveness,
                               StatusExchange& exchange, Investigator& investigator)
    : options_(options),
      history_(history),
      state_(state),
      liveness_(liveness),
      exchange_(exchange),
      investigator_(investigator) {}

void ProgressChecks::Track(const std::optional<CallHistory::Call>& oldest, Clock::time_point now,
                           Tracked& tracked) {
  if (!oldest) {
    tracked = {};
  } else if (oldest->number != tracked.number) {
    tracked = {.number = oldest->number, .since = now};
  }
}

void ProgressChecks::Observe() {
  const Clock::time_point now = Clock::now();
  Track(history_.OldestCollective(), now, collective_);
  const std::optional<CallHistory::Call> message = history_.OldestMessage();
  if (message && message->number != message_.number) message_record_ = message->record;
  Track(message, now, message_);
  const TrainingThread* thread = options_.training_thread.get();
  const int64_t round = thread == nullptr ? 0 : thread->waits_in_round();
  if (static_cast<uint64_t>(round) != round_.number) {
    round_ = {.number = static_cast<uint64_t>(round), .since = now};
  }
  if (!IsWaitingForDeadRank()) {
    dead_since_.reset();
  } else if (!dead_since_) {
    dead_since_ = now;
  }
}

bool ProgressChecks::IsWaitingForDeadRank() const {
  const std::set<int> dead = liveness_.peers().Dead();
  if (dead.empty()) return false;
  if (collective_.number != 0) return true;
  if (message_.number == 0) return false;
  const int peer = message_record_.root;
  return peer == kNoRoot || dead.count(peer) != 0;
}

bool ProgressChecks::IsWaitLong() const {
  const auto is_slow = [&](const Tracked& tracked) {
    return tracked.number != 0 && Elapsed(tracked.since) > HeartbeatInterval(options_.size) / 2;
  };
  return is_slow(collective_) || is_slow(message_) || state_.wants_dead_ranks();
}

// No grace period if a probe was refused, which may have been a firewall: then the answer of that
// rank is waited for instead.
bool ProgressChecks::DeadRankIsDue() const {
  const bool refused = !liveness_.peers().refused().empty();
  return dead_since_ &&
         Elapsed(*dead_since_) > (refused ? absl::ZeroDuration() : kDeathGracePeriod);
}

absl::Duration ProgressChecks::DeadReplyTimeout() const {
  return liveness_.peers().refused().empty()
             ? kDeathReplyTimeout
             : HeartbeatInterval(options_.size) + kDeathReplyTimeout;
}

bool ProgressChecks::IsStall(absl::Duration age) const {
  return options_.stall > absl::ZeroDuration() && age >= options_.stall;
}

void ProgressChecks::CheckPending() {
  if (collective_.number != 0) CheckCollective();
  if (!state_.aborted() && message_.number != 0) CheckMessage();
  if (!state_.aborted() && round_.number != 0) CheckRound();
}

// Another rank may have called a collective before this one began to wait in the round: then its
// own check has found nothing.
void ProgressChecks::CheckRound() {
  if (round_.compared || Elapsed(round_.since) < kCompareAfter) return;
  round_.compared = true;
  investigator_.Investigate(/*number=*/0, Symptom::kOutside, ReplyTimeout(options_.size));
}

void ProgressChecks::CheckCollective() {
  const absl::Duration age = Elapsed(collective_.since);
  if (IsStall(age) && !collective_.reported) {
    collective_.reported = collective_.compared = true;
    const Diagnosis diagnosis = investigator_.Investigate(collective_.number, Symptom::kSlow,
                                                          RemoteReplyTimeout(options_.size));
    if (!state_.aborted()) ReportStall(collective_.number, age, diagnosis.text);
  } else if (age >= kCompareAfter && !collective_.compared) {
    collective_.compared = true;
    investigator_.Investigate(collective_.number, Symptom::kSlow, ReplyTimeout(options_.size));
  } else if (DeadRankIsDue() && !collective_.checked_dead) {
    collective_.checked_dead = true;
    investigator_.Investigate(collective_.number, Symptom::kSlow, DeadReplyTimeout());
  }
}

void ProgressChecks::CheckMessage() {
  const absl::Duration age = Elapsed(message_.since);
  if (IsStall(age) && !message_.reported) {
    message_.reported = true;
    investigator_.Investigate(/*number=*/0, Symptom::kSlow, ReplyTimeout(options_.size));
    if (state_.aborted()) return;
    ABSL_LOG(ERROR) << options_.name << ": rank " << options_.rank << " has waited "
                    << absl::FormatDuration(absl::Trunc(age, absl::Seconds(1))) << " in "
                    << ToString(message_record_) << MessageCounts(message_record_);
  } else if (collective_.number == 0 && DeadRankIsDue() && !message_.checked_dead) {
    // Needed for Gloo's receive from any rank: it belongs to no connection, so no lost connection
    // ends it.
    message_.checked_dead = true;
    investigator_.Investigate(/*number=*/0, Symptom::kSlow, DeadReplyTimeout());
  }
}

void ProgressChecks::FindDeadRanks() {
  if (!state_.wants_dead_ranks() || liveness_.peers().Dead() == state_.dead_ranks()) return;
  std::optional<std::set<int>> dead =
      investigator_.FindDeadRanks(RemoteReplyTimeout(options_.size));
  if (dead) state_.SetDeadRanks(*std::move(dead));
}

void ProgressChecks::CompareRanks(bool advanced) {
  if (options_.rank != 0) return;
  if (!options_.sees_completion) CheckLag();
  if (!advanced) return;
  for (const std::optional<RankReport>& report : exchange_.store().ReadAll()) {
    if (report && SignaturesDiffer(history_.collectives(), *report)) {
      investigator_.Investigate(/*number=*/0, Symptom::kSlow, ReplyTimeout(options_.size));
      return;
    }
  }
}

void ProgressChecks::CheckLag() {
  uint64_t least = exchange_.observed_count();
  uint64_t most = exchange_.observed_count();
  for (const std::optional<RankReport>& report : exchange_.store().ReadAll()) {
    const uint64_t count = report ? report->count : 0;
    least = std::min(least, count);
    most = std::max(most, count);
  }
  if (least == most) {
    lag_ = {};
    return;
  }
  if (lag_.number != least + 1) lag_ = {.number = least + 1, .since = Clock::now()};
  const absl::Duration age = Elapsed(lag_.since);
  if (age >= kCompareAfter && !lag_.compared) {
    lag_.compared = true;
    investigator_.Investigate(/*number=*/0, Symptom::kSlow, ReplyTimeout(options_.size));
  } else if (IsStall(age) && !lag_.reported) {
    lag_.reported = true;
    const Diagnosis diagnosis =
        investigator_.Investigate(lag_.number, Symptom::kSlow, RemoteReplyTimeout(options_.size));
    if (!state_.aborted()) ReportStall(lag_.number, age, diagnosis.text);
  }
}

void ProgressChecks::ReportStall(uint64_t number, absl::Duration age, const std::string& text) {
  if (!exchange_.store().ClaimStallReport(number, options_.rank)) return;
  ABSL_LOG(ERROR) << options_.name << ": rank " << options_.rank << " has waited "
                  << absl::FormatDuration(absl::Trunc(age, absl::Milliseconds(100))) << " in "
                  << history_.collectives().Name(number) << ": " << text
                  << (exchange_.store().unreachable()
                          ? " (as far as known: the store cannot be reached)"
                          : "");
}

std::string ProgressChecks::MessageCounts(const CallRecord& record) const {
  const int peer = record.root;
  const std::vector<std::optional<RankReport>>& reports = exchange_.store().last_read();
  if (peer < 0 || peer >= options_.size || !reports[peer]) return "";
  const RankReport& theirs = *reports[peer];
  const bool sends = record.kind == CollectiveKind::kSend;
  const std::map<int, uint64_t>& counts = sends ? theirs.received : theirs.sent;
  const auto theirs_count = counts.find(options_.rank);
  return absl::StrCat(", ", sends ? "send " : "receive ",
                      sends ? history_.sent(peer) : history_.received(peer),
                      sends ? " to rank " : " from rank ", peer, ", which has called ",
                      theirs_count == counts.end() ? 0 : theirs_count->second,
                      sends ? " receives from rank " : " sends to rank ", options_.rank,
                      theirs.left ? " and has left the group" : "");
}

}  // namespace ddp::backends::watch
