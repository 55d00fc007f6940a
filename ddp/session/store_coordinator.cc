#include "ddp/session/store_coordinator.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "backends/common/join.h"
#include "base/exit_code.h"
#include "base/option_error.h"
#include "base/rank_list.h"
#include "base/status.h"

namespace ddp::session {
namespace {

// Payload of errors that a round has returned; its value is one of the next two.
constexpr absl::string_view kRound = "libtorch_ddp/round";
constexpr absl::string_view kAnnounced = "announced";
constexpr absl::string_view kNotAnnounced = "not announced";

// Waits poll the store: c10d logs two lines for each Store::wait that times out, and no other
// request can use the connection meanwhile. Between two looks passes a sixteenth of the time waited
// so far, within these limits. The upper one bounds the load of a long wait on the store, to 500
// looks per second of all ranks together.
absl::Duration ShortestInterval(int size) {
  return std::max(absl::Microseconds(100), size * absl::Microseconds(20));
}
absl::Duration LongestInterval(int size) {
  return std::clamp(size * absl::Milliseconds(2), absl::Milliseconds(20), absl::Seconds(5));
}

// Dead ranks are looked for after this time, and count after as much again: a process may have set
// its key just before it ended.
constexpr absl::Duration kBeforeDead = absl::Milliseconds(400);

// Once a rank has died: maximum wait for ranks that work alone.
constexpr absl::Duration kPatienceAfterDeath = absl::Seconds(10);

// Begins the message that others set in a round for a dead rank; the rest is the error. Differs
// from all messages of living ranks.
constexpr absl::string_view kDied = "died ";

std::vector<uint8_t> Bytes(absl::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Set once a rank has read the results of a round, or has given up.
std::string ReadKey(const std::string& prefix, int rank) {
  return absl::StrCat(prefix, "read/", rank);
}

void PrintLine(absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  std::fwrite(text.data(), 1, text.size(), stderr);
}

absl::Status Marked(absl::Status status, absl::string_view value) {
  if (!status.ok()) status.SetPayload(kRound, absl::Cord(value));
  return status;
}

// The message of one rank in a round, after the letter of its call: "0 BYTES"; or "CODE EXIT LENGTH
// PAYLOAD MESSAGE", where EXIT is the exit code that the error asks for, 0 if none, and PAYLOAD is
// its ProblemPayload, in LENGTH bytes.
std::string Encode(const absl::StatusOr<std::string>& mine) {
  if (mine.ok()) return absl::StrCat("0 ", *mine);
  const std::string payload = ProblemPayload(mine.status());
  return absl::StrCat(static_cast<int>(mine.status().code()), " ",
                      ExitCodeIn(mine.status()).value_or(0), " ", payload.size(), " ", payload,
                      mine.status().message());
}

// Reads the number before the next blank and removes both.
template <typename Number>
bool ConsumeNumber(absl::string_view& text, Number& number) {
  const size_t blank = text.find(' ');
  if (blank == absl::string_view::npos || !absl::SimpleAtoi(text.substr(0, blank), &number)) {
    return false;
  }
  text.remove_prefix(blank + 1);
  return true;
}

absl::StatusOr<std::string> Decode(absl::string_view text) {
  absl::string_view rest = text;
  int code = 0, exit_code = 0;
  size_t length = 0;
  if (ConsumeNumber(rest, code)) {
    if (code == 0) return std::string(rest);
    if (ConsumeNumber(rest, exit_code) && ConsumeNumber(rest, length) && length <= rest.size()) {
      absl::Status error =
          WithProblemPayload(absl::Status(static_cast<absl::StatusCode>(code), rest.substr(length)),
                             rest.substr(0, length));
      return exit_code == 0 ? error : WithExitCode(std::move(error), exit_code);
    }
  }
  return absl::InternalError(absl::StrCat("cannot read another rank's result, '", text, "'"));
}

}  // namespace

bool NamesItsRank(absl::string_view message) {
  if (!absl::ConsumePrefix(&message, "rank ")) return false;
  const size_t digits = message.find_first_not_of("0123456789");
  return digits != 0 && digits != absl::string_view::npos &&
         absl::StartsWith(message.substr(digits), ": ");
}

bool WasAnnounced(const absl::Status& status) {
  return status.GetPayload(kRound) == absl::Cord(kAnnounced);
}

bool IsFromCoordinator(const absl::Status& status) { return status.GetPayload(kRound).has_value(); }

std::string StoreCoordinator::Name(Call call) {
  switch (call) {
    case Call::kAgree:
      return "Agree";
    case Call::kAgreeAtEnd:
      return "no call any more (its work has ended)";
    case Call::kBroadcast:
      return "Broadcast";
    case Call::kAllGather:
      return "AllGather";
    case Call::kGather:
      return "Gather";
    case Call::kAny:
      return "any call";
  }
  return "an unknown call";
}

void StoreCoordinator::Set(const std::string& key, absl::string_view value) const {
  keys_.push_back(key);
  options_.store->set(key, Bytes(value));
}

// The store may be lost: the next wait reports it.
void StoreCoordinator::DeleteOldKeys() const {
  CatchStatus("", [&] {
    for (const std::string& key : std::exchange(old_keys_, {})) options_.store->deleteKey(key);
  }).IgnoreError();
}

absl::Status StoreCoordinator::StoreLost(const std::vector<int>& ranks,
                                         const absl::Status& error) const {
  return absl::UnavailableError(absl::StrCat(
      "rank ", options_.rank, ": Connection closed by the rendezvous store, while waiting for ",
      RankList(ranks), ": the rank that serves it has ended (", error.message(), ")"));
}

// Waits until all keys are set; rank ranks[i] sets keys[i]. Unavailable if some of those that are
// missing are dead; `found_dead`, if not null, gets them then.
absl::Status StoreCoordinator::Wait(const std::vector<std::string>& keys,
                                    const std::vector<int>& ranks, absl::Duration timeout,
                                    std::vector<int>* found_dead) const {
  if (keys.empty()) return absl::OkStatus();
  const absl::Time start = absl::Now();
  absl::Duration look_for_dead_after = kBeforeDead;
  absl::Duration report_after = options_.report_after;
  std::vector<int> dead, dead_before;
  while (true) {
    const absl::Duration waited = absl::Now() - start;
    const bool is_over = waited >= timeout;
    const bool report = report_after > absl::ZeroDuration() && waited >= report_after;
    bool complete = false;
    std::vector<int> missing;  // if `is_over` or `report`
    const absl::Status asked = CatchStatus("", [&] {
      complete = options_.store->check(keys);
      if (!complete && (is_over || report)) {
        for (int i : backends::MissingKeys(*options_.store, keys)) missing.push_back(ranks[i]);
        complete = missing.empty();
      }
      if (!complete && waited >= look_for_dead_after) {
        look_for_dead_after = waited + kBeforeDead;
        dead_before = std::exchange(dead, Dead(keys, ranks));
      }
    });
    if (!asked.ok()) return StoreLost(ranks, asked);
    if (complete) return absl::OkStatus();
    if (options_.gives_up && options_.gives_up()) {
      return absl::CancelledError(
          absl::StrCat("rank ", options_.rank, " has given up waiting for ", RankList(ranks)));
    }
    std::vector<int> certain;
    std::set_intersection(dead.begin(), dead.end(), dead_before.begin(), dead_before.end(),
                          std::back_inserter(certain));
    if (!certain.empty()) {
      if (found_dead != nullptr) *found_dead = certain;
      return absl::UnavailableError(
          absl::StrCat("rank ", options_.rank, ": Connection closed by peer: ", RankList(certain),
                       certain.size() == 1 ? " has" : " have", " died, while rank ", options_.rank,
                       " waited for ", certain.size() == 1 ? "it" : "them",
                       " to load data, save a checkpoint or the like"));
    }
    if (is_over) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", options_.rank, ": Timed out after ", absl::FormatDuration(timeout),
                       " of waiting for ", RankList(missing),
                       " to load data, save a checkpoint or the like; if that takes longer, raise "
                       "work_timeout_s"));
    }
    if (report) {
      Report(missing, waited, timeout);
      report_after *= 2;
    }
    const absl::Duration interval =
        std::clamp(waited / 16, ShortestInterval(options_.size), LongestInterval(options_.size));
    absl::SleepFor(std::min(interval, timeout - waited));
  }
}

// Only the lowest rank that is not missing reports.
void StoreCoordinator::Report(const std::vector<int>& missing, absl::Duration waited,
                              absl::Duration timeout) const {
  int speaker = 0;
  while (std::find(missing.begin(), missing.end(), speaker) != missing.end()) ++speaker;
  if (speaker != options_.rank) return;
  const std::string line =
      absl::StrCat("waiting for ", RankList(missing), " since ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(100))),
                   " to load data, save a checkpoint or the like (work_timeout_s=",
                   absl::ToDoubleSeconds(timeout), ")");
  options_.report ? options_.report(line) : PrintLine(line);
}

// Those of `ranks`, in ascending order, that are known to be dead and whose keys are not set.
std::vector<int> StoreCoordinator::Dead(const std::vector<std::string>& keys,
                                        const std::vector<int>& ranks) const {
  std::vector<int> result;
  if (!options_.dead_ranks) return result;
  const std::set<int> dead = options_.dead_ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (dead.count(ranks[i]) != 0 && !options_.store->check({keys[i]})) result.push_back(ranks[i]);
  }
  return result;
}

// Sets the keys of dead ranks in a round, so that all other ranks end it with the same error. Has
// no effect where another rank has done so.
void StoreCoordinator::AnswerFor(const std::vector<int>& dead, const std::string& prefix,
                                 const absl::Status& death) const {
  CatchStatus("", [&] {
    for (int rank : dead) {
      Set(ReadKey(prefix, rank), "1");
      keys_.push_back(absl::StrCat(prefix, rank));
      options_.store->compareSet(keys_.back(), /*expectedValue=*/{},
                                 Bytes(absl::StrCat(kDied, death.message())));
    }
  }).IgnoreError();  // the next wait reports it
}

// The error of ranks that make different calls of one round, as where only rank 0 saves a
// checkpoint.
absl::Status StoreCoordinator::DifferentCalls(const std::map<Call, std::vector<int>>& calls) {
  const std::string made = absl::StrJoin(calls, ", ", [](std::string* out, const auto& entry) {
    const auto& [call, ranks] = entry;
    absl::StrAppend(out, RankList(ranks), ranks.size() == 1 ? " makes " : " make ", Name(call));
  });
  return absl::FailedPreconditionError(
      absl::StrCat("the ranks do not make the same Coordinator call: ", made,
                   "; saves, loads and the like are for all ranks"));
}

// Every rank's text, in rank order.
absl::StatusOr<std::vector<std::string>> StoreCoordinator::Exchange(const std::string& prefix,
                                                                    const std::string& mine,
                                                                    absl::Duration timeout) const {
  std::vector<std::string> keys;
  std::vector<int> ranks;
  for (int peer = 0; peer < options_.size; ++peer) {
    keys.push_back(absl::StrCat(prefix, peer));
    ranks.push_back(peer);
  }
  const size_t before = keys_.size();
  const absl::Status told = CatchStatus("", [&] { Set(keys[options_.rank], mine); });
  if (!told.ok()) return StoreLost(ranks, told);
  DeleteOldKeys();  // while other ranks get here
  std::vector<int> dead;
  absl::Status waited = Wait(keys, ranks, timeout, &dead);
  const absl::Status first_death = dead.empty() ? absl::OkStatus() : waited;
  const absl::Time deadline = absl::Now() + kPatienceAfterDeath;
  while (!dead.empty()) {
    AnswerFor(std::exchange(dead, {}), prefix, first_death);
    waited = Wait(keys, ranks, deadline - absl::Now(), &dead);
  }
  if (!waited.ok()) return first_death.ok() ? waited : first_death;
  // Every rank that lives has begun this round, so it has ended those before, or has given them up.
  const auto present = keys_.begin() + static_cast<std::ptrdiff_t>(before);
  old_keys_.insert(old_keys_.end(), keys_.begin(), present);
  keys_.erase(keys_.begin(), present);
  std::vector<std::string> texts;
  DDP_RETURN_IF_ERROR(CatchStatus("reading the other ranks' results", [&] {
    for (const std::vector<uint8_t>& value : options_.store->multiGet(keys)) {
      texts.push_back(Text(value));
    }
  }));
  return texts;
}

// Waits until rank 0 has announced `agreed` and all ranks have read the round: a rank that exits
// early may end the job, and the store ends with rank 0.
absl::Status StoreCoordinator::Settle(const std::string& prefix, const absl::Status& agreed) const {
  const std::string announced = absl::StrCat(prefix, "announced");
  if (options_.rank != 0) {
    DDP_RETURN_IF_ERROR(Wait({announced}, {0}, options_.timeout));
    return CatchStatus("", [&] { Set(ReadKey(prefix, options_.rank), "1"); });
  }
  if (!agreed.ok() && options_.announce) options_.announce(agreed);
  std::vector<std::string> keys;
  std::vector<int> peers;
  for (int peer = 1; peer < options_.size; ++peer) {
    keys.push_back(ReadKey(prefix, peer));
    peers.push_back(peer);
  }
  DDP_RETURN_IF_ERROR(CatchStatus("", [&] { Set(announced, "1"); }));
  return Wait(keys, peers, options_.timeout);
}

// One round of any call. A failed rank calls Agree while others may be in any of the others; all of
// them return its error.
absl::StatusOr<std::vector<std::string>> StoreCoordinator::Round(
    const absl::StatusOr<std::string>& mine, Call call, absl::Duration timeout) const {
  const int64_t number = ++rounds_;
  if (options_.on_round) options_.on_round(number, /*begins=*/true);
  auto result = RoundNumbered(number, mine, mine.ok() ? call : Call::kAny, timeout);
  if (options_.on_round) options_.on_round(number, /*begins=*/false);
  return result;
}

absl::StatusOr<std::vector<std::string>> StoreCoordinator::RoundNumbered(
    int64_t number, const absl::StatusOr<std::string>& mine, Call call,
    absl::Duration timeout) const {
  const std::string prefix = absl::StrCat("round/", number, "/");
  const std::string letter(1, static_cast<char>(call));
  const absl::StatusOr<std::vector<std::string>> all =
      Exchange(prefix, absl::StrCat(letter, Encode(mine)), timeout);
  if (!all.ok()) {
    // Rank 0 need not wait for this rank to read the round.
    CatchStatus("", [&] { Set(ReadKey(prefix, options_.rank), "1"); }).IgnoreError();
    // Prefer this rank's own error to the failure to exchange it.
    return Marked(mine.ok() ? all.status() : mine.status(), kNotAnnounced);
  }
  std::vector<std::string> values;
  absl::Status agreed, death;
  std::map<Call, std::vector<int>> calls;
  for (int peer = 0; peer < options_.size && agreed.ok(); ++peer) {
    absl::string_view text = (*all)[peer];
    if (absl::ConsumePrefix(&text, kDied)) {
      if (death.ok()) death = absl::UnavailableError(text);
      values.emplace_back();
      continue;
    }
    const Call made = text.empty() ? Call::kAny : static_cast<Call>(text[0]);
    if (made != Call::kAny) calls[made].push_back(peer);
    absl::StatusOr<std::string> theirs = Decode(text.substr(std::min<size_t>(1, text.size())));
    if (theirs.ok()) {
      values.push_back(*std::move(theirs));
      continue;
    }
    agreed = peer == options_.rank ? mine.status() : theirs.status();
    // The error may be another rank's, which the ranks have exchanged before.
    if (!NamesItsRank(agreed.message())) agreed = Annotate(agreed, absl::StrCat("rank ", peer));
  }
  // Another rank's own error may be the cause.
  if (agreed.ok()) agreed = death;
  if (agreed.ok() && calls.size() > 1) agreed = DifferentCalls(calls);
  const bool settle = call == Call::kAgree || call == Call::kAgreeAtEnd || call == Call::kAny;
  if (settle || !agreed.ok()) {
    const absl::Status settled = Settle(prefix, agreed);
    // If another rank cannot settle, rank 0 may not have announced the error.
    const bool announced =
        !agreed.ok() && options_.announce && (settled.ok() || options_.rank == 0);
    agreed = Marked(agreed.ok() ? settled : agreed, announced ? kAnnounced : kNotAnnounced);
  }
  if (!agreed.ok()) return agreed;
  return values;
}

absl::Status StoreCoordinator::AgreeAs(Call call, const absl::Status& mine,
                                       absl::Duration timeout) const {
  if (options_.size == 1) return mine;
  const absl::StatusOr<std::string> result =
      mine.ok() ? absl::StatusOr<std::string>("") : absl::StatusOr<std::string>(mine);
  return Round(result, call, timeout).status();
}

absl::Status StoreCoordinator::Agree(const absl::Status& mine) const {
  return AgreeAs(Call::kAgree, mine, options_.timeout);
}

absl::Status StoreCoordinator::AgreeAtEnd(const absl::Status& mine) const {
  return AgreeAs(Call::kAgreeAtEnd, mine, options_.timeout);
}

absl::Status StoreCoordinator::AgreeOnFailure(const absl::Status& mine,
                                              absl::Duration patience) const {
  return AgreeAs(Call::kAny, mine, std::min(patience, options_.timeout));
}

absl::StatusOr<std::string> StoreCoordinator::Broadcast(
    const absl::StatusOr<std::string>& value) const {
  if (options_.size == 1) return value;
  const bool sends = options_.rank == 0 || !value.ok();
  DDP_ASSIGN_OR_RETURN(
      std::vector<std::string> all,
      Round(sends ? value : absl::StatusOr<std::string>(""), Call::kBroadcast, options_.timeout));
  return std::move(all[0]);
}

absl::StatusOr<std::vector<std::string>> StoreCoordinator::AllGather(
    const std::string& mine) const {
  if (options_.size == 1) return std::vector<std::string>{mine};
  return Round(mine, Call::kAllGather, options_.timeout);
}

// The round has no bytes, and begins once they are in the store.
absl::StatusOr<std::vector<std::string>> StoreCoordinator::Gather(const std::string& mine) const {
  const auto key = [prefix = absl::StrCat("gathered/", rounds_ + 1, "/")](int rank) {
    return absl::StrCat(prefix, rank);
  };
  absl::StatusOr<std::string> told("");
  if (options_.rank != 0) {
    const absl::Status set =
        CatchStatus("", [&] { options_.store->set(key(options_.rank), Bytes(mine)); });
    if (!set.ok()) told = StoreLost({0}, set);
  }
  const absl::Status round =
      options_.size == 1 ? absl::OkStatus() : Round(told, Call::kGather, options_.timeout).status();
  // It is deleted once rank 0 has begun the next round.
  if (options_.rank != 0) keys_.push_back(key(options_.rank));
  DDP_RETURN_IF_ERROR(round);
  if (options_.rank != 0) return std::vector<std::string>();
  std::vector<std::string> all = {mine}, keys;
  for (int peer = 1; peer < options_.size; ++peer) keys.push_back(key(peer));
  if (keys.empty()) return all;
  DDP_RETURN_IF_ERROR(CatchStatus("reading what the other ranks gather", [&] {
    for (const std::vector<uint8_t>& value : options_.store->multiGet(keys)) {
      all.push_back(Text(value));
    }
  }));
  return all;
}

}  // namespace ddp::session
