#include "backends/watch/examine.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

namespace ddp::backends::watch {
namespace {

using Kind = Finding::Kind;

const Recorder::Entry* Find(const Report& report, uint64_t number) {
  for (const Recorder::Entry& entry : report.tail) {
    if (entry.number == number) return &entry;
  }
  return nullptr;
}

// The first collective that not all ranks have called alike; 0: none that can be seen.
uint64_t FirstMismatch(const Picture& picture) {
  std::map<uint64_t, const Recorder::Entry*> calls;
  uint64_t first = 0;
  for (const std::optional<Report>& report : picture.reports) {
    if (!report) continue;
    for (const Recorder::Entry& entry : report->tail) {
      const Recorder::Entry* known = calls.emplace(entry.number, &entry).first->second;
      if (entry.signature == known->signature && Agree(entry.record, known->record)) continue;
      if (first == 0 || entry.number < first) first = entry.number;
    }
  }
  return first;
}

// The ranks by what they called as their collective `number`, in the order of the lowest rank.
std::string BothSides(const Picture& picture, uint64_t number) {
  std::vector<std::pair<std::string, std::set<int>>> sides;
  for (int rank = 0; rank < static_cast<int>(picture.reports.size()); ++rank) {
    const std::optional<Report>& report = picture.reports[rank];
    if (!report || Find(*report, number) == nullptr) continue;
    const std::string text = Describe(*report, number);
    auto side = std::find_if(sides.begin(), sides.end(),
                             [&](const auto& known) { return known.first == text; });
    if (side == sides.end()) side = sides.insert(sides.end(), {text, {}});
    side->second.insert(rank);
  }
  std::string text = absl::StrJoin(sides, "; ", [](std::string* out, const auto& side) {
    absl::StrAppend(out, RankList(side.second), ": ", side.first);
  });
  if (sides.size() < 2) absl::StrAppend(&text, "; they have differed since an earlier collective");
  return text;
}

std::optional<Finding> FindMismatch(const Picture& picture) {
  const uint64_t number = FirstMismatch(picture);
  if (number == 0) return std::nullopt;
  return Finding{Kind::kMismatch,
                 absl::StrCat("the ranks do not make the same call: ", BothSides(picture, number))};
}

std::string After(const Report& report) {
  if (report.count == 0) return " before its first collective";
  return absl::StrCat(" after ", Describe(report, report.count));
}

std::string Ago(const Report& report) {
  return absl::FormatDuration(absl::Milliseconds(report.idle_ms / 100 * 100));
}

// Whether the rank's leaving can be to blame: not for collectives it had called by then.
bool Lacks(const Report& report, uint64_t needed) { return report.count < needed; }

std::optional<Finding> FindDead(const Picture& picture, uint64_t needed) {
  if (picture.dead.empty()) return std::nullopt;
  std::vector<std::string> texts;
  for (int rank : picture.dead) {
    const std::optional<Report>& report = picture.reports[rank];
    std::string text = absl::StrCat("rank ", rank);
    if (!report) {
      absl::StrAppend(&text, " has died");
    } else if (report->left) {
      if (!Lacks(*report, needed)) continue;
      absl::StrAppend(&text, " left the group", After(*report), ", and its process has ended");
    } else {
      absl::StrAppend(&text, " has died (process ",
                      report->process.substr(0, report->process.find('@')), ")");
      if (report->count > 0) {
        absl::StrAppend(&text, "; it was last seen at ", Describe(*report, report->count));
      }
      if (!report->failure.empty()) {
        absl::StrAppend(&text, "; its own call had failed: ", report->failure);
      }
    }
    texts.push_back(std::move(text));
  }
  if (texts.empty()) return std::nullopt;
  return Finding{Kind::kDead,
                 absl::StrCat("Connection closed by peer: ", absl::StrJoin(texts, "; "))};
}

std::optional<Finding> FindLeft(const Picture& picture, uint64_t needed) {
  for (int rank = 0; rank < static_cast<int>(picture.reports.size()); ++rank) {
    const std::optional<Report>& report = picture.reports[rank];
    if (!report || !report->left || rank == picture.rank || !Lacks(*report, needed)) continue;
    return Finding{Kind::kLeft, absl::StrCat("Connection closed by peer: rank ", rank,
                                             " left the group", After(*report))};
  }
  return std::nullopt;
}

std::optional<Finding> FindSilent(const Picture& picture) {
  if (picture.silent.empty()) return std::nullopt;
  return Finding{
      Kind::kSilent,
      absl::StrCat(RankList(picture.silent), picture.silent.size() == 1 ? " does" : " do",
                   " not answer: dead on another host, stopped, or cut off")};
}

std::optional<Finding> FindFailed(const Picture& picture) {
  for (int rank = 0; rank < static_cast<int>(picture.reports.size()); ++rank) {
    const std::optional<Report>& report = picture.reports[rank];
    if (rank == picture.rank || !report || report->failure.empty()) continue;
    return Finding{Kind::kFailed, absl::StrCat("rank ", rank, " has failed: ", report->failure)};
  }
  return std::nullopt;
}

// Who has come to collective `number`, who has not, and what those do instead.
Finding FindMissing(const Picture& picture, uint64_t number) {
  std::set<int> there;
  std::vector<std::string> missing;
  for (int rank = 0; rank < static_cast<int>(picture.reports.size()); ++rank) {
    const std::optional<Report>& report = picture.reports[rank];
    if (!report) {
      missing.push_back(absl::StrCat("rank ", rank, " (has told nothing since the group began)"));
      continue;
    }
    if (report->count >= number) {
      there.insert(rank);
      continue;
    }
    const std::string last = report->count == 0 ? "" : Describe(*report, report->count);
    std::string text;
    if (picture.silent.count(rank) != 0) {
      // What it has reported may be long past.
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
  return {Kind::kMissing,
          absl::StrCat("reached by ", RankList(there), "; not by ", absl::StrJoin(missing, ", "))};
}

}  // namespace

Finding Examine(const Picture& picture, uint64_t number, Question question) {
  // A message that failed may have needed anything that a rank can do.
  const bool message_failed = number == 0 && question == Question::kWhyFailed;
  const uint64_t needed = message_failed ? std::numeric_limits<uint64_t>::max() : number;
  if (std::optional<Finding> finding = FindMismatch(picture)) return *finding;
  if (std::optional<Finding> finding = FindDead(picture, needed)) return *finding;
  if (std::optional<Finding> finding = FindLeft(picture, needed)) return *finding;
  if (question == Question::kWhyFailed) {
    if (std::optional<Finding> finding = FindSilent(picture)) return *finding;
    if (std::optional<Finding> finding = FindFailed(picture)) return *finding;
  }
  if (number == 0) return {};
  return FindMissing(picture, number);
}

bool SignaturesDiffer(const Recorder& mine, const Report& theirs) {
  const std::optional<uint64_t> now = mine.SignatureAt(theirs.count);
  if (now) return *now != theirs.signature;
  const std::optional<uint64_t> mark = mine.SignatureAt(theirs.mark);
  return mark && *mark != theirs.mark_signature;
}

std::string Describe(const Report& report, uint64_t number) {
  const Recorder::Entry* entry = Find(report, number);
  if (entry == nullptr) return absl::StrCat("#", number);
  return absl::StrCat("#", number, " ", ToString(entry->record));
}

std::string RankList(const std::set<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace ddp::backends::watch
