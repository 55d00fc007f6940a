#include "base/option_list.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/status.h"
#include "base/utf8.h"

namespace ddp {
namespace {

constexpr size_t kHelpColumn = 34;
constexpr size_t kHelpWidth = 100;

// Levels may be joined by '.' or '_'.
std::string Canonical(absl::string_view name) { return absl::StrReplaceAll(name, {{".", "_"}}); }

// The path of which this one is the option "name": "optimizer" of "optimizer.name".
std::optional<absl::string_view> GroupOf(absl::string_view path) {
  if (!absl::EndsWith(path, ".name")) return std::nullopt;
  return path.substr(0, path.size() - absl::string_view(".name").size());
}

// The suffixes of a path that start a level: "a.b.c", "b.c", "c".
std::vector<absl::string_view> Tails(absl::string_view path) {
  std::vector<absl::string_view> tails = {path};
  for (size_t i = 0; i < path.size(); ++i) {
    if (path[i] == '.') tails.push_back(path.substr(i + 1));
  }
  return tails;
}

bool HasTail(absl::string_view path, const std::string& canonical) {
  const std::vector<absl::string_view> tails = Tails(path);
  return std::any_of(tails.begin(), tails.end(),
                     [&](absl::string_view tail) { return Canonical(tail) == canonical; });
}

// Levenshtein distance: minimum number of insertions, deletions and substitutions that turn `a`
// into `b`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// Whether two names this far apart may be mistaken for each other. Short ones must have something
// in common.
bool IsNear(size_t distance, absl::string_view name) {
  return distance <= std::max<size_t>(2, name.size() / 3) &&
         (distance < 2 || distance < name.size());
}

// Names by their distance.
using Distances = std::vector<std::pair<size_t, std::string>>;

// DidYouMean for candidates whose distances are known: the nearest three, all of a group before
// those of the next.
std::string SuggestNearest(std::vector<Distances> groups) {
  std::vector<std::string> names;
  for (Distances& near : groups) {
    std::sort(near.begin(), near.end());
    for (const auto& [distance, candidate] : near) {
      const bool is_new = std::find(names.begin(), names.end(), candidate) == names.end();
      if (is_new && names.size() < 3) names.push_back(candidate);
    }
  }
  return names.empty() ? "" : absl::StrCat("; did you mean ", absl::StrJoin(names, ", "), "?");
}

// A group that a name begins with: "optimizer" of "optimizer.learn_rate".
struct GroupOfName {
  absl::string_view group;  // its path; empty: none
  std::string rest;         // of the name, canonical; empty if the group is only similar
};

// The group whose path, or a tail of it, is the longest with which `name` begins; otherwise, for a
// name with dots, one that is near to what is before the last.
GroupOfName FindGroup(absl::string_view name, const std::vector<OptionRef>& options) {
  const std::string wanted = Canonical(name);
  const size_t last_dot = name.rfind('.');
  GroupOfName found;
  size_t length = 0;
  for (const OptionRef& option : options) {
    const absl::string_view path = option.path;
    for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
      const absl::string_view group = path.substr(0, dot);
      for (absl::string_view tail : Tails(group)) {
        if (tail.size() > length && absl::StartsWith(wanted, absl::StrCat(Canonical(tail), "_"))) {
          length = tail.size();
          found = {group, wanted.substr(length + 1)};
        } else if (found.group.empty() && last_dot != name.npos &&
                   IsNear(EditDistance(tail, name.substr(0, last_dot)), tail)) {
          found = {group, ""};
        }
      }
    }
  }
  return found;
}

// The path of an option without that of `group`, if it is of that group.
std::optional<absl::string_view> InsideGroup(absl::string_view path, absl::string_view group) {
  if (group.empty() || !absl::ConsumePrefix(&path, group) || !absl::ConsumePrefix(&path, ".")) {
    return std::nullopt;
  }
  return path;
}

std::vector<std::string> Words(absl::string_view text, absl::string_view separators) {
  return absl::StrSplit(absl::AsciiStrToLower(text), absl::ByAnyChar(separators),
                        absl::SkipEmpty());
}
std::vector<std::string> WordsOfHelp(absl::string_view help) { return Words(help, " ,;:.-()"); }
std::vector<std::string> WordsOfName(absl::string_view name) { return Words(name, "._"); }

// Whether `help` begins with the words of a name, each as the beginning of a word: "learning rate
// of the optimizer" with those of "learn_rate". A single word says too little.
bool BeginsWithName(absl::string_view help, absl::string_view name) {
  const std::vector<std::string> of_help = WordsOfHelp(help), of_name = WordsOfName(name);
  const auto begins = [](const std::string& word, const std::string& other) {
    return absl::StartsWith(other, word);
  };
  return of_name.size() > 1 && of_name.size() <= of_help.size() &&
         std::equal(of_name.begin(), of_name.end(), of_help.begin(), begins);
}

// The place in `help` of the words of a name, in any order: 0 for "rate_learn" in "learning rate of
// the optimizer". nullopt if one is missing, or too short to tell.
std::optional<size_t> PlaceInHelp(absl::string_view name, absl::string_view help) {
  constexpr size_t kShortest = 3;
  const std::vector<std::string> of_help = WordsOfHelp(help);
  std::optional<size_t> place;
  for (const std::string& word : WordsOfName(name)) {
    const auto found = std::find_if(of_help.begin(), of_help.end(), [&](const std::string& other) {
      return absl::StartsWith(other, word);
    });
    if (word.size() < kShortest || found == of_help.end()) return std::nullopt;
    const size_t at = static_cast<size_t>(found - of_help.begin());
    place = std::min(place.value_or(at), at);
  }
  return place;
}

// "; optimizer has name, lr"; empty without a group.
std::string ListGroup(absl::string_view group, const std::vector<OptionRef>& options) {
  if (group.empty()) return "";
  std::vector<absl::string_view> names;
  for (const OptionRef& option : options) {
    if (const auto inside = InsideGroup(option.path, group)) names.push_back(*inside);
  }
  return absl::StrCat("; ", group, " has ", absl::StrJoin(names, ", "));
}

// `text` in lines of at most kHelpWidth, all but the first indented.
std::string Wrapped(absl::string_view text) {
  std::string result;
  size_t column = kHelpColumn;
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (column + word.size() + 1 > kHelpWidth) {
      absl::StrAppend(&result, "\n", std::string(kHelpColumn, ' '));
      column = kHelpColumn;
    } else if (!result.empty()) {
      result += ' ';
      ++column;
    }
    absl::StrAppend(&result, word);
    column += word.size();
  }
  return result;
}

}  // namespace

void OptionList::Add(OptionRef option) { options_.push_back(std::move(option)); }

void OptionList::AddGroup(OptionGroup group) { groups_.push_back(std::move(group)); }

void OptionList::LetDiffer(size_t begin) {
  for (size_t i = begin; i < options_.size(); ++i) {
    options_[i].across_ranks = OptionAcrossRanks::kMayDiffer;
  }
}

// The matches of the first kind of name that matches any option.
std::vector<const OptionRef*> OptionList::Matches(absl::string_view name) const {
  // A whole path, as files that a program has written have them, needs no further comparison.
  const auto same = [&](const OptionRef& option) { return option.path == name; };
  const auto exact = std::find_if(options_.begin(), options_.end(), same);
  if (exact != options_.end() && std::find_if(exact + 1, options_.end(), same) == options_.end()) {
    return {&*exact};
  }
  const std::string wanted = Canonical(name);
  const auto group_has_tail = [&](const OptionRef& option) {
    const auto group = GroupOf(option.path);
    return group && HasTail(*group, wanted);
  };
  const std::function<bool(const OptionRef&)> kinds[] = {
      [&](const OptionRef& option) { return Canonical(option.path) == wanted; },
      [&](const OptionRef& option) {
        return std::find(option.aliases.begin(), option.aliases.end(), name) !=
               option.aliases.end();
      },
      group_has_tail,
      [&](const OptionRef& option) { return HasTail(option.path, wanted); },
  };
  std::vector<const OptionRef*> found;
  for (const auto& fits : kinds) {
    for (const OptionRef& option : options_) {
      if (fits(option)) found.push_back(&option);
    }
    if (!found.empty()) break;
  }
  return found;
}

absl::StatusOr<const OptionRef*> OptionList::Find(absl::string_view name) const {
  const std::vector<const OptionRef*> found = Matches(name);
  if (found.size() == 1) return found[0];
  if (found.size() > 1) {
    std::vector<std::string> paths;
    for (const OptionRef* option : found) paths.push_back(option->path);
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is ambiguous: it may mean ", absl::StrJoin(paths, ", ")));
  }
  const GroupOfName in = FindGroup(name, options_);
  // A long name of a group does not make all options of the group similar.
  const absl::string_view differs = in.rest.empty() ? name : absl::string_view(in.rest);
  const std::map<std::string, std::string> names = ShortNames();
  // A name may be cut short ("batch" of batch_size), or be what the help says ("learning_rate").
  const std::string begin = absl::StrCat(Canonical(differs), "_");
  Distances longer, by_help, near;
  for (const OptionRef& option : options_) {
    const std::string& short_name = names.at(option.path);
    const auto inside = InsideGroup(option.path, in.rest.empty() ? "" : in.group);
    const size_t distance = inside
                                ? EditDistance(Canonical(*inside), in.rest)
                                : std::min(EditDistance(short_name, name),
                                           EditDistance(Canonical(option.path), Canonical(name)));
    if (IsNear(distance, differs)) near.emplace_back(distance, short_name);
    if (!in.rest.empty() && !inside) continue;
    const absl::string_view own_name = Tails(option.path).back();
    if (absl::StartsWith(own_name, begin) || absl::StartsWith(short_name, begin)) {
      longer.emplace_back(distance, short_name);
    }
    if (BeginsWithName(option.help, differs)) by_help.emplace_back(distance, short_name);
  }
  // Without a similar name, the help may have the words elsewhere.
  if (longer.empty() && by_help.empty() && near.empty()) {
    std::optional<size_t> first;
    for (const OptionRef& option : options_) {
      if (!in.rest.empty() && !InsideGroup(option.path, in.group)) continue;
      const std::optional<size_t> place = PlaceInHelp(differs, option.help);
      if (!place || (first && *place > *first)) continue;
      if (first && *place < *first) by_help.clear();
      first = place;
      by_help.emplace_back(0, names.at(option.path));
    }
  }
  std::string advice = SuggestNearest({std::move(longer), std::move(by_help), std::move(near)});
  if (advice.empty()) advice = ListGroup(in.group, options_);
  return absl::NotFoundError(absl::StrCat("there is no option '", name, "'", advice));
}

absl::Status OptionList::Set(absl::string_view name, absl::string_view value) const {
  DDP_ASSIGN_OR_RETURN(const OptionRef* option, Find(name));
  const absl::Status set = option->set(value);
  if (set.ok()) return set;
  return OptionError(option->path, value, set.message(), set.code());
}

absl::Status OptionList::Validate() const {
  for (const OptionRef& option : options_) {
    const std::string value = option.get();
    absl::Status checked = CheckText(value, option.any_bytes);
    if (checked.ok()) checked = option.check();
    if (!checked.ok()) {
      return OptionError(option.path, Printable(value), checked.message(), checked.code());
    }
  }
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> OptionList::Table() const {
  std::vector<std::pair<std::string, std::string>> table;
  for (const OptionRef& option : options_) table.emplace_back(option.path, option.get());
  return table;
}

std::string OptionList::ShortName(const OptionRef& option) const {
  // Aliases are the established names, except abbreviations of one letter.
  for (const std::string& alias : option.aliases) {
    if (alias.size() > 1) return alias;
  }
  const auto group = GroupOf(option.path);
  std::vector<std::string> candidates;
  for (absl::string_view tail : Tails(group ? *group : absl::string_view(option.path))) {
    candidates.push_back(Canonical(tail));
  }
  std::string best = option.path;
  for (const std::string& candidate : candidates) {
    const std::vector<const OptionRef*> found = Matches(candidate);
    if (found.size() == 1 && found[0] == &option && candidate.size() <= best.size()) {
      best = candidate;
    }
  }
  return best;
}

std::map<std::string, std::string> OptionList::ShortNames() const {
  std::map<std::string, std::string> names;
  for (const OptionRef& option : options_) names[option.path] = ShortName(option);
  return names;
}

std::string OptionList::Describe(absl::string_view prefix) const {
  std::string text;
  const auto describe = [&](absl::string_view group) {
    for (const OptionRef& option : options_) {
      const size_t dot = option.path.rfind('.');
      const absl::string_view level =
          dot == std::string::npos ? "" : absl::string_view(option.path).substr(0, dot);
      if (level != group) continue;
      const std::string value = option.get();
      std::string line = absl::StrCat("  ", prefix, ShortName(option), "=", value);
      if (line.size() + 2 > kHelpColumn) {
        absl::StrAppend(&line, "\n", std::string(kHelpColumn, ' '));
      } else {
        line.resize(kHelpColumn, ' ');
      }
      const std::string bounds =
          option.bounds.empty() ? "" : absl::StrCat(" (", option.bounds, ")");
      absl::StrAppend(&text, line, Wrapped(absl::StrCat(option.help, bounds)), "\n");
    }
  };
  describe("");
  for (const OptionGroup& group : groups_) {
    const std::string before = std::exchange(text, "");
    describe(group.path);
    const std::string options = std::exchange(text, before);
    if (options.empty()) continue;
    absl::StrAppend(&text, "\n", group.path, ": ", group.help, "\n", options);
  }
  return text;
}

absl::Status OptionList::CheckNames() const {
  std::set<std::string> names;
  for (const OptionRef& option : options_) {
    if (!names.insert(Canonical(option.path)).second) {
      return absl::AlreadyExistsError(absl::StrCat("two options are named ", option.path));
    }
  }
  for (const OptionRef& option : options_) {
    for (const std::string& alias : option.aliases) {
      if (!names.insert(alias).second) {
        return absl::AlreadyExistsError(
            absl::StrCat("alias ", alias, " of ", option.path, " names another option"));
      }
    }
  }
  return absl::OkStatus();
}

std::string DidYouMean(absl::string_view name, const std::vector<std::string>& candidates) {
  Distances near;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name, candidate);
    if (IsNear(distance, name)) near.emplace_back(distance, candidate);
  }
  return SuggestNearest({std::move(near)});
}

}  // namespace ddp
