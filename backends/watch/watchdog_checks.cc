// What the watchdog thinks of that which goes on for long.

#include <algorithm>

#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "backends/watch/watchdog.h"

namespace ddp::backends::watch {
namespace {

// How long a collective may be under way before the ranks compare calls.
constexpr absl::Duration kSuspicious = absl::Seconds(1);
// How long a collective may go on after a rank's process has ended: that rank may have done its
// part.
constexpr absl::Duration kDeathGrace = absl::Milliseconds(100);
// How long the others' reports may then take: the dead is known, and half a second is all there is.
constexpr absl::Duration kDeathPatience = absl::Milliseconds(50);

}  // namespace

// Of a rank whose door is shut, and that may have a firewall before it, an answer is waited for.
absl::Duration Watchdog::DeathGrace() const {
  return peers_.shut().empty() ? kDeathGrace : absl::ZeroDuration();
}
absl::Duration Watchdog::DeathPatience() const {
  return peers_.shut().empty() ? kDeathPatience : beat_ + kDeathPatience;
}

void Watchdog::CheckOldest() {
  const bool may_stall = options_.stall > absl::ZeroDuration();
  if (oldest_.number != 0) {
    const absl::Duration age = Since(oldest_.since);
    if (may_stall && age >= options_.stall && !oldest_.reported) {
      oldest_.reported = oldest_.compared = true;
      const Finding finding = Investigate(oldest_.number, Question::kWhySlow, RemotePatience());
      if (!condemned()) ReportStall(oldest_.number, age, finding.text);
    } else if (age >= kSuspicious && !oldest_.compared) {
      oldest_.compared = true;
      Investigate(oldest_.number, Question::kWhySlow, Patience());
    } else if (death_seen_ && Since(*death_seen_) > DeathGrace() && !oldest_.blamed_on_dead) {
      oldest_.blamed_on_dead = true;
      Investigate(oldest_.number, Question::kWhySlow, DeathPatience());
    }
  }
  if (!condemned() && oldest_message_.number != 0) CheckOldestMessage();
}

void Watchdog::CheckOldestMessage() {
  const absl::Duration age = Since(oldest_message_.since);
  if (options_.stall > absl::ZeroDuration() && age >= options_.stall && !oldest_message_.reported) {
    oldest_message_.reported = true;
    Investigate(/*number=*/0, Question::kWhySlow, Patience());
    if (condemned()) return;
    ABSL_LOG(ERROR) << options_.name << ": rank " << options_.rank << " has waited "
                    << absl::FormatDuration(absl::Trunc(age, absl::Seconds(1))) << " in "
                    << ToString(oldest_message_record_) << MessagesBetween(oldest_message_record_);
  } else if (oldest_.number == 0 && death_seen_ && Since(*death_seen_) > DeathGrace() &&
             !oldest_message_.blamed_on_dead) {
    // Gloo's receive from any rank waits on: no connection is its own.
    oldest_message_.blamed_on_dead = true;
    Investigate(/*number=*/0, Question::kWhySlow, DeathPatience());
  }
}

// Without a view of completion: the ranks' counts must not differ for long.
void Watchdog::CheckBehind() {
  uint64_t least = seen_count_;
  uint64_t most = seen_count_;
  for (const std::optional<Report>& report : board_.ReadAll()) {
    const uint64_t count = report ? report->count : 0;
    least = std::min(least, count);
    most = std::max(most, count);
  }
  if (least == most) {
    behind_ = {};
    return;
  }
  if (behind_.number != least + 1) behind_ = {.number = least + 1, .since = Clock::now()};
  const absl::Duration age = Since(behind_.since);
  if (age >= kSuspicious && !behind_.compared) {
    behind_.compared = true;
    Investigate(/*number=*/0, Question::kWhySlow, Patience());
  } else if (options_.stall > absl::ZeroDuration() && age >= options_.stall && !behind_.reported) {
    behind_.reported = true;
    const Finding finding = Investigate(behind_.number, Question::kWhySlow, RemotePatience());
    if (!condemned()) ReportStall(behind_.number, age, finding.text);
  }
}

void Watchdog::ReportStall(uint64_t number, absl::Duration age, const std::string& text) {
  if (!board_.ClaimStall(number, options_.rank)) return;
  ABSL_LOG(ERROR) << options_.name << ": rank " << options_.rank << " has waited "
                  << absl::FormatDuration(absl::Trunc(age, absl::Milliseconds(100))) << " in "
                  << collectives_.Name(number) << ": " << text
                  << (board_.lost() ? " (as far as known: the store cannot be reached)" : "");
}

std::string Watchdog::MessagesBetween(const Record& record) {
  const int peer = record.root;
  if (peer < 0 || peer >= options_.size || !board_.last_read()[peer]) return "";
  const Report& theirs = *board_.last_read()[peer];
  const bool sends = record.op == Op::kSend;
  const std::map<int, uint64_t>& counts = sends ? theirs.received : theirs.sent;
  const auto theirs_count = counts.find(options_.rank);
  return absl::StrCat(", ", sends ? "send " : "receive ", (sends ? sent_ : received_)[peer].load(),
                      sends ? " to rank " : " from rank ", peer, ", which has called ",
                      theirs_count == counts.end() ? 0 : theirs_count->second,
                      sends ? " receives from rank " : " sends to rank ", options_.rank,
                      theirs.left ? " and has left the group" : "");
}

}  // namespace ddp::backends::watch
