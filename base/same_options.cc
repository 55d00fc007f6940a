#include "base/same_options.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/digest.h"
#include "base/option_error.h"
#include "base/rank_list.h"
#include "base/status.h"

namespace ddp {
namespace {

// Occurs in no path and no value, which a command line has brought.
constexpr char kSeparator = '\0';
constexpr absl::string_view kSame = "same";
constexpr absl::string_view kAllRanksOrNone = "all or none";

constexpr size_t kMostGroups = 4;  // of ranks with one value, in a message
constexpr size_t kMostOthers = 5;  // further options, in a message

// Whether, in the place of a path, it stands for what all ranks find together.
bool IsFoundTogether(const std::string& value) { return value == "auto" || value == "best"; }

// An option of one rank.
struct Row {
  std::string path;
  std::string rule;
  std::string value;

  // What must be equal on all ranks. Paths are "set", and so are lists of them.
  std::string Compared() const {
    if (rule == kSame || IsFoundTogether(value)) return value;
    return value.empty() || value == "[]" ? "" : "set";
  }
};

std::vector<Row> RowsOf(const OptionList& list) {
  std::vector<Row> rows;
  for (const OptionRef& option : list.options()) {
    if (option.across_ranks == OptionAcrossRanks::kMayDiffer) continue;
    const bool same = option.across_ranks == OptionAcrossRanks::kSame;
    rows.push_back({option.path, std::string(same ? kSame : kAllRanksOrNone), option.get()});
  }
  return rows;
}

// "ranks 0, 2 have 0.1, rank 1 has none".
std::string WhoHasWhat(const std::vector<std::string>& values) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;  // by the lowest rank
  for (size_t rank = 0; rank < values.size(); ++rank) {
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& known) { return known.first == values[rank]; });
    if (group == groups.end()) group = groups.insert(groups.end(), {values[rank], {}});
    group->second.push_back(static_cast<int>(rank));
  }
  std::vector<std::string> texts;
  for (const auto& [value, ranks] : groups) {
    if (texts.size() == kMostGroups) {
      texts.push_back("others have others");
      break;
    }
    texts.push_back(absl::StrCat(RankList(ranks), ranks.size() == 1 ? " has " : " have ",
                                 value.empty() ? "none" : value));
  }
  return absl::StrJoin(texts, ", ");
}

// Of one option, by rank.
struct Values {
  std::vector<std::string> values;
  std::vector<std::string> compared;
  std::string rule;
};

}  // namespace

std::string DigestOfOptions(const OptionList& list) {
  Digester digester;
  for (const Row& row : RowsOf(list)) {
    digester.AddField(row.path);
    digester.AddField(row.Compared());
  }
  return digester.Hex();
}

std::string TextOfOptions(const OptionList& list) {
  std::vector<std::string> fields;
  for (const Row& row : RowsOf(list)) {
    fields.insert(fields.end(), {row.path, row.rule, row.value});
  }
  return absl::StrJoin(fields, absl::string_view(&kSeparator, 1));
}

absl::Status DifferenceOfOptions(const std::vector<std::string>& texts) {
  std::vector<std::string> paths;  // in the order of the first list that has them
  std::map<std::string, Values> options;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const std::vector<std::string> fields = absl::StrSplit(texts[rank], kSeparator);
    for (size_t i = 0; i + 2 < fields.size(); i += 3) {
      const Row row = {fields[i], fields[i + 1], fields[i + 2]};
      const auto [option, is_new] = options.try_emplace(row.path);
      if (is_new) {
        paths.push_back(row.path);
        option->second.rule = row.rule;
        // Ranks of another program may lack it.
        option->second.values.assign(texts.size(), "no such option");
        option->second.compared.assign(texts.size(), "no such option");
      }
      option->second.values[rank] = row.value;
      option->second.compared[rank] = row.Compared();
    }
  }
  std::vector<std::string> different;
  for (const std::string& path : paths) {
    const std::vector<std::string>& compared = options[path].compared;
    const bool fits = std::all_of(compared.begin(), compared.end(),
                                  [&](const std::string& one) { return one == compared[0]; });
    if (!fits) different.push_back(path);
  }
  if (different.empty()) return absl::OkStatus();
  const Values& first = options[different[0]];
  const auto together = std::find_if(first.values.begin(), first.values.end(), IsFoundTogether);
  const std::string what = together == first.values.end() ? "set" : *together;
  std::string problem = absl::StrCat(
      first.rule == kSame ? "is not the same on all ranks: "
                          : absl::StrCat("must be ", what, " on all ranks or on none: "),
      WhoHasWhat(first.values));
  if (different.size() > 1) {
    std::vector<std::string> others(different.begin() + 1, different.end());
    const bool all = others.size() <= kMostOthers;
    if (!all) others.resize(kMostOthers);
    absl::StrAppend(&problem, "; ranks also differ in ", absl::StrJoin(others, ", "),
                    all ? "" : ", …");
  }
  return OptionError(different[0], first.values[0], problem);
}

absl::Status ExplainDifference(const Coordinator& ranks, const OptionList& list) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> texts, ranks.AllGather(TextOfOptions(list)));
  absl::Status difference = DifferenceOfOptions(texts);
  if (difference.ok()) {
    difference = absl::InternalError("the ranks' options are equal, but their digests differ");
  }
  return ranks.Agree(difference);
}

absl::Status RequireSameOptions(const Coordinator& ranks, const OptionList& list,
                                const absl::Status& mine) {
  // A rank that has failed may call Agree where others call AllGather.
  if (!mine.ok()) return ranks.Agree(mine);
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> digests,
                       ranks.AllGather(DigestOfOptions(list)));
  const bool same = std::all_of(digests.begin(), digests.end(),
                                [&](const std::string& one) { return one == digests[0]; });
  return same ? absl::OkStatus() : ExplainDifference(ranks, list);
}

}  // namespace ddp
