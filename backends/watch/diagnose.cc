#include "backends/watch/diagnose.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "backends/watch/training_thread.h"
#include "base/rank_list.h"

namespace ddp::backends::watch {
namespace {

using Kind = Diagnosis::Kind;

const Recorder::Entry* Find(const RankReport& report, uint64_t number) {
  for (const Recorder::Entry& entry : report.tail) {
    if (entry.number == number) return &entry;
  }
  return nullptr;
}

// The first collective whose calls differ between the reports; 0: none.
uint64_t FirstMismatch(const GroupStatus& status) {
  std::map<uint64_t, const Recorder::Entry*> calls;
  uint64_t first = 0;
  for (const std::optional<RankReport>& report : status.reports) {
    if (!report) continue;
    for (const Recorder::Entry& entry : report->tail) {
      const Recorder::Entry* known = calls.emplace(entry.number, &entry).first->second;
      if (entry.signature == known->signature && Agree(entry.record, known->record)) continue;
      if (first == 0 || entry.number < first) first = entry.number;
    }
  }
  return first;
}

// Ranks grouped by what they called as collective `number`, ordered by the lowest rank.
std::string GroupedCalls(const GroupStatus& status, uint64_t number) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (int rank = 0; rank < static_cast<int>(status.reports.size()); ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (!report || Find(*report, number) == nullptr) continue;
    const std::string text = CallText(*report, number);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& known) { return known.first == text; });
    if (group == groups.end()) group = groups.insert(groups.end(), {text, {}});
    group->second.push_back(rank);
  }
  std::string text = absl::StrJoin(groups, "; ", [](std::string* out, const auto& group) {
    absl::StrAppend(out, RankList(group.second), ": ", group.first);
  });
  if (groups.size() < 2) absl::StrAppend(&text, "; they have differed since an earlier collective");
  return text;
}

std::optional<Diagnosis> FindMismatch(const GroupStatus& status) {
  const uint64_t number = FirstMismatch(status);
  if (number == 0) return std::nullopt;
  return Diagnosis{Kind::kMismatch, absl::StrCat("the ranks do not make the same call: ",
                                                 GroupedCalls(status, number))};
}

std::string After(const RankReport& report) {
  if (report.count == 0) return " before its first collective";
  return absl::StrCat(" after ", CallText(report, report.count));
}

std::string Ago(const RankReport& report) {
  return absl::FormatDuration(absl::Milliseconds(report.idle_ms / 100 * 100));
}

// Whether the rank has not called collective `needed`. If it has, its leaving is not the cause.
bool HasNotCalled(const RankReport& report, uint64_t needed) { return report.count < needed; }

std::optional<Diagnosis> FindDead(const GroupStatus& status, uint64_t needed) {
  if (status.dead.empty()) return std::nullopt;
  std::vector<std::string> texts;
  for (int rank : status.dead) {
    const std::optional<RankReport>& report = status.reports[rank];
    std::string text = absl::StrCat("rank ", rank);
    if (!report) {
      absl::StrAppend(&text, " has died");
    } else if (report->left) {
      if (!HasNotCalled(*report, needed)) continue;
      absl::StrAppend(&text, " left the group", After(*report), ", and its process has ended");
    } else {
      absl::StrAppend(&text, " has died (process ",
                      report->process.substr(0, report->process.find('@')), ")");
      if (report->count > 0) {
        absl::StrAppend(&text, "; it was last seen at ", CallText(*report, report->count));
      }
      if (!report->failure.empty()) {
        absl::StrAppend(&text, "; its own call had failed: ", report->failure);
      }
    }
    texts.push_back(std::move(text));
  }
  if (texts.empty()) return std::nullopt;
  return Diagnosis{Kind::kDead,
                   absl::StrCat("Connection closed by peer: ", absl::StrJoin(texts, "; "))};
}

std::optional<Diagnosis> FindLeft(const GroupStatus& status, uint64_t needed) {
  for (int rank = 0; rank < static_cast<int>(status.reports.size()); ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (!report || !report->left || rank == status.rank || !HasNotCalled(*report, needed)) continue;
    return Diagnosis{Kind::kLeft, absl::StrCat("Connection closed by peer: rank ", rank,
                                               " left the group", After(*report))};
  }
  return std::nullopt;
}

// Age of a call at which it counts as waiting: the calls of a root may complete without the others.
constexpr int64_t kWaitingMs = 900;

// The oldest collective that has not ended.
const Recorder::Entry* Oldest(const RankReport& report) {
  for (const Recorder::Entry& entry : report.tail) {
    if (!entry.ended) return &entry;
  }
  return nullptr;
}

// Ranks that wait in a collective for ranks that will not call it: they wait, in their training
// thread, in a Coordinator call that the former have not begun, or their work has ended. `number`:
// the collective that this rank knows to be slow; 0: none.
std::optional<Diagnosis> FindWaitForEachOther(const GroupStatus& status, uint64_t number) {
  const auto& reports = status.reports;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!reports[rank]) continue;
    const RankReport& waiting = *reports[rank];
    const bool is_known_slow = rank == status.rank && number != 0;
    const Recorder::Entry* slow = is_known_slow ? Find(waiting, number) : Oldest(waiting);
    if (slow == nullptr || slow->ended || waiting.aborted) continue;
    if (!is_known_slow && waiting.idle_ms < kWaitingMs) continue;
    const Recorder::Entry* awaited = Find(waiting, waiting.awaited);
    std::vector<int> ended, in_round;
    for (int peer = 0; peer < static_cast<int>(reports.size()); ++peer) {
      if (peer == rank || !reports[peer] || reports[peer]->count >= slow->number) continue;
      if (reports[peer]->aborted) continue;  // it has failed, and waits to say so
      if (reports[peer]->has_ended) {
        ended.push_back(peer);
      } else if (awaited != nullptr && !awaited->ended &&
                 reports[peer]->waits_in_round > waiting.rounds_begun) {
        in_round.push_back(peer);
      }
    }
    if (ended.empty() && in_round.empty()) continue;
    const std::vector<int>& missing = ended.empty() ? in_round : ended;
    const bool one = missing.size() == 1;
    std::string text =
        absl::StrCat(kWaitForEachOther, "rank ", rank, " in ", CallText(waiting, slow->number),
                     ", which ", RankList(missing), one ? " has" : " have", " not called");
    if (ended.empty()) {
      absl::StrAppend(&text, "; ", RankList(missing),
                      " in a Coordinator call (a save, a load, or Agree, Broadcast, AllGather), "
                      "which rank ",
                      rank, " has not made. All ranks must make the same calls in the same order");
    } else {
      absl::StrAppend(&text, " and will not: ", one ? "its" : "their",
                      " work has ended. Give all ranks equally many batches, or use Join");
    }
    return Diagnosis{Kind::kWaitForEachOther, std::move(text)};
  }
  return std::nullopt;
}

// A backend may not notice: Gloo's send, once queued, outlives the connection (tcp::Pair signals
// only its bound buffers).
std::optional<Diagnosis> FindAborted(const GroupStatus& status) {
  for (int rank = 0; rank < static_cast<int>(status.reports.size()); ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (!report || !report->aborted || rank == status.rank) continue;
    return Diagnosis{Kind::kAborted, absl::StrCat("Connection closed by peer: rank ", rank,
                                                  " has aborted the group", After(*report))};
  }
  return std::nullopt;
}

std::optional<Diagnosis> FindUnresponsive(const GroupStatus& status) {
  if (status.unresponsive.empty()) return std::nullopt;
  const std::vector<int> ranks(status.unresponsive.begin(), status.unresponsive.end());
  return Diagnosis{Kind::kUnresponsive,
                   absl::StrCat(RankList(ranks), ranks.size() == 1 ? " does" : " do",
                                " not answer: dead on another host, stopped, or cut off")};
}

std::optional<Diagnosis> FindFailed(const GroupStatus& status) {
  for (int rank = 0; rank < static_cast<int>(status.reports.size()); ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (rank == status.rank || !report || report->failure.empty()) continue;
    return Diagnosis{Kind::kFailed, absl::StrCat("rank ", rank, " has failed: ", report->failure)};
  }
  return std::nullopt;
}

// Which ranks have called collective `number`, which have not, and their last calls.
Diagnosis FindMissing(const GroupStatus& status, uint64_t number) {
  std::vector<int> reached;
  std::vector<std::string> missing;
  for (int rank = 0; rank < static_cast<int>(status.reports.size()); ++rank) {
    const std::optional<RankReport>& report = status.reports[rank];
    if (!report) {
      missing.push_back(
          absl::StrCat("rank ", rank, " (has not reported since the group was created)"));
      continue;
    }
    if (report->count >= number) {
      reached.push_back(rank);
      continue;
    }
    const std::string last = report->count == 0 ? "" : CallText(*report, report->count);
    std::string text;
    if (status.unresponsive.count(rank) != 0) {
      // Its report may be old.
      text =
          last.empty() ? "does not answer" : absl::StrCat("does not answer; last seen at ", last);
    } else if (last.empty()) {
      text = "no call yet";
    } else {
      text = absl::StrCat("last call ", last, ", ", Ago(*report), " ago");
      if (const Recorder::Entry* entry = Find(*report, report->count);
          entry != nullptr && !entry->ended) {
        absl::StrAppend(&text, " and still under way");
      }
    }
    if (!report->failure.empty()) absl::StrAppend(&text, "; failed: ", report->failure);
    missing.push_back(absl::StrCat("rank ", rank, " (", text, ")"));
  }
  if (missing.empty()) {
    return {Kind::kNothing,
            "all ranks have called it: it is slow, or the network between them hangs"};
  }
  return {Kind::kMissing, absl::StrCat("reached by ", RankList(reached), "; not by ",
                                       absl::StrJoin(missing, ", "))};
}

}  // namespace

Diagnosis Diagnose(const GroupStatus& status, uint64_t number, Symptom symptom) {
  if (symptom == Symptom::kOutside) {
    return FindWaitForEachOther(status, /*number=*/0).value_or(Diagnosis{});
  }
  // A failed message may have needed any call of the other rank.
  const bool is_failed_message = number == 0 && symptom == Symptom::kFailed;
  const uint64_t needed = is_failed_message ? std::numeric_limits<uint64_t>::max() : number;
  if (std::optional<Diagnosis> diagnosis = FindMismatch(status)) return *diagnosis;
  if (std::optional<Diagnosis> diagnosis = FindDead(status, needed)) return *diagnosis;
  if (std::optional<Diagnosis> diagnosis = FindLeft(status, needed)) return *diagnosis;
  if (std::optional<Diagnosis> diagnosis = FindAborted(status)) return *diagnosis;
  if (number != 0 && symptom == Symptom::kSlow) {
    if (std::optional<Diagnosis> diagnosis = FindWaitForEachOther(status, number)) {
      return *diagnosis;
    }
  }
  if (symptom == Symptom::kFailed) {
    if (std::optional<Diagnosis> diagnosis = FindUnresponsive(status)) return *diagnosis;
    if (std::optional<Diagnosis> diagnosis = FindFailed(status)) return *diagnosis;
  }
  if (number == 0) return {};
  return FindMissing(status, number);
}

bool SignaturesDiffer(const Recorder& mine, const RankReport& theirs) {
  const std::optional<uint64_t> now = mine.SignatureAt(theirs.count);
  if (now) return *now != theirs.signature;
  const std::optional<uint64_t> mark = mine.SignatureAt(theirs.mark);
  return mark && *mark != theirs.mark_signature;
}

std::string CallText(const RankReport& report, uint64_t number) {
  const Recorder::Entry* entry = Find(report, number);
  if (entry == nullptr) return absl::StrCat("#", number);
  return absl::StrCat("#", number, " ", ToString(entry->record));
}

}  // namespace ddp::backends::watch
