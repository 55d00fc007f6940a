#include "ddp/session/store_coordinator.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace ddp::session {
namespace {

constexpr absl::string_view kAnnounced = "libtorch_ddp/announced";

// Longest single wait at the store: a lost connection is noticed after it at the latest.
constexpr absl::Duration kSlice = absl::Seconds(5);

std::vector<uint8_t> Bytes(absl::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string Named(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

void PrintLine(absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  std::fwrite(text.data(), 1, text.size(), stderr);
}

// A status as one text: code, blank, message.
std::string Encode(const absl::Status& status) {
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

absl::Status Decode(absl::string_view text) {
  int code = 0;
  const size_t blank = text.find(' ');
  if (!absl::SimpleAtoi(text.substr(0, blank), &code)) {
    return absl::InternalError(absl::StrCat("'", text, "' is no rank's result"));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), text.substr(blank + 1));
}

}  // namespace

bool WasAnnounced(const absl::Status& status) { return status.GetPayload(kAnnounced).has_value(); }

std::string StoreCoordinator::NextPrefix() const {
  return absl::StrCat("exchange/", exchanges_++, "/");
}

// keys[i] is to be set by rank ranks[i].
absl::Status StoreCoordinator::Wait(const std::vector<std::string>& keys,
                                    const std::vector<int>& ranks) const {
  if (keys.empty()) return absl::OkStatus();
  const absl::Time start = absl::Now();
  const absl::Time deadline = start + options_.timeout;
  absl::Duration report_after = options_.report_after;
  while (true) {
    const absl::Time now = absl::Now();
    absl::Time until = std::min(deadline, now + kSlice);
    if (report_after > absl::ZeroDuration()) until = std::min(until, start + report_after);
    const absl::Duration slice = std::max(until - now, absl::Milliseconds(1));
    const absl::Status waited =
        CatchStatus("", [&] { options_.store->wait(keys, absl::ToChronoMilliseconds(slice)); });
    if (waited.ok()) return waited;
    std::vector<int> missing;
    const absl::Status asked = CatchStatus("", [&] {
      for (size_t i = 0; i < keys.size(); ++i) {
        if (!options_.store->check({keys[i]})) missing.push_back(ranks[i]);
      }
    });
    if (!asked.ok()) {
      return absl::UnavailableError(absl::StrCat(
          "rank ", options_.rank, ": Connection closed by the rendezvous store, while waiting for ",
          Named(ranks), ": the rank that serves it has ended (", asked.message(), ")"));
    }
    if (missing.empty()) return absl::OkStatus();
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", options_.rank, ": Timed out after ",
                       absl::FormatDuration(options_.timeout), " of waiting for ", Named(missing),
                       " to load data, save a checkpoint or the like; if that takes longer, raise "
                       "work_timeout_s"));
    }
    if (report_after > absl::ZeroDuration() && absl::Now() - start >= report_after) {
      // One rank speaks for all that wait: the lowest that is not waited for.
      int speaker = 0;
      while (std::find(missing.begin(), missing.end(), speaker) != missing.end()) ++speaker;
      if (speaker == options_.rank) {
        const std::string line = absl::StrCat(
            "waiting for ", Named(missing), " since ",
            absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(100))),
            " to load data, save a checkpoint or the like (work_timeout_s=",
            absl::ToDoubleSeconds(options_.timeout), ")");
        options_.report ? options_.report(line) : PrintLine(line);
      }
      report_after *= 2;
    }
  }
}

// Every rank's text.
absl::StatusOr<std::vector<std::string>> StoreCoordinator::Exchange(const std::string& prefix,
                                                                    const std::string& mine) const {
  std::vector<std::string> keys;
  std::vector<int> ranks;
  for (int peer = 0; peer < options_.size; ++peer) {
    keys.push_back(absl::StrCat(prefix, peer));
    ranks.push_back(peer);
  }
  DDP_RETURN_IF_ERROR(CatchStatus("telling the other ranks a result",
                                  [&] { options_.store->set(keys[options_.rank], Bytes(mine)); }));
  DDP_RETURN_IF_ERROR(Wait(keys, ranks));
  std::vector<std::string> texts;
  DDP_RETURN_IF_ERROR(CatchStatus("reading the other ranks' results", [&] {
    for (const std::vector<uint8_t>& value : options_.store->multiGet(keys)) {
      texts.push_back(Text(value));
    }
  }));
  return texts;
}

absl::Status StoreCoordinator::Agree(const absl::Status& mine) const {
  if (options_.size == 1) return mine;
  const std::string prefix = NextPrefix();
  const absl::StatusOr<std::vector<std::string>> all = Exchange(prefix, Encode(mine));
  // A rank's own error tells more than that it could not tell the others.
  if (!all.ok()) return mine.ok() ? all.status() : mine;
  absl::Status agreed;
  for (int peer = 0; peer < options_.size && agreed.ok(); ++peer) {
    const absl::Status theirs = Decode((*all)[peer]);
    if (theirs.ok()) continue;
    agreed = Annotate(peer == options_.rank ? mine : theirs, absl::StrCat("rank ", peer));
    if (options_.announce) agreed.SetPayload(kAnnounced, absl::Cord(""));
  }
  // Who exits first may take the others with it, so all wait until the error is out; and at the end
  // of a run, rank 0, which serves the store, until everybody has read it.
  const std::string announced = absl::StrCat(prefix, "announced");
  const auto has_read = [&](int peer) { return absl::StrCat(prefix, "read/", peer); };
  absl::Status left;
  if (options_.rank == 0) {
    if (!agreed.ok() && options_.announce) options_.announce(agreed.message());
    std::vector<std::string> keys;
    std::vector<int> peers;
    for (int peer = 1; peer < options_.size; ++peer) {
      keys.push_back(has_read(peer));
      peers.push_back(peer);
    }
    left = CatchStatus("", [&] { options_.store->set(announced, Bytes("1")); });
    if (left.ok()) left = Wait(keys, peers);
  } else {
    left = Wait({announced}, {0});
    if (left.ok()) {
      left = CatchStatus("", [&] { options_.store->set(has_read(options_.rank), Bytes("1")); });
    }
  }
  return agreed.ok() ? left : agreed;
}

absl::StatusOr<std::string> StoreCoordinator::Broadcast(
    const absl::StatusOr<std::string>& value) const {
  if (options_.size == 1) return value;
  const std::string key = absl::StrCat(NextPrefix(), "value");
  absl::Status mine = value.status();
  if (mine.ok() && options_.rank == 0) {
    mine = CatchStatus("telling the other ranks rank 0's value",
                       [&] { options_.store->set(key, Bytes(*value)); });
  }
  DDP_RETURN_IF_ERROR(Agree(mine));
  return CatchStatus("reading rank 0's value", [&] { return Text(options_.store->get(key)); });
}

absl::StatusOr<std::vector<std::string>> StoreCoordinator::AllGather(
    const std::string& mine) const {
  if (options_.size == 1) return std::vector<std::string>{mine};
  absl::StatusOr<std::vector<std::string>> all = Exchange(NextPrefix(), mine);
  // Nobody leaves, and takes the store along, before all have read.
  DDP_RETURN_IF_ERROR(Agree(all.status()));
  return all;
}

}  // namespace ddp::session
