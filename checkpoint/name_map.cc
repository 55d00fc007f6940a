#include "checkpoint/name_map.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

constexpr char kOption[] = "init_map";

// `text` in ECMAScript's form, where \1 is $01: one digit more may follow it. The greatest group
// that it names is `groups`.
std::string Replacement(absl::string_view text, int& groups) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (text[i] == '\\' && next == '\\') {
      result += '\\';
      ++i;
    } else if ((text[i] == '\\' || text[i] == '$') && absl::ascii_isdigit(next)) {
      groups = std::max(groups, next - '0');
      absl::StrAppend(&result, "$0", std::string(1, next));
      ++i;
    } else {
      result += text[i];
      if (text[i] == '$' && next != '\0') result += text[++i];  // $& and the like
    }
  }
  return result;
}

}  // namespace

std::vector<std::string> SplitRules(absl::string_view rules) {
  std::vector<std::string> parts(1);
  int depth = 0;
  bool in_class = false;
  for (size_t i = 0; i < rules.size(); ++i) {
    const char c = rules[i];
    if (c == ',' && depth == 0 && !in_class) {
      parts.emplace_back();
      continue;
    }
    parts.back() += c;
    if (c == '\\' && i + 1 < rules.size()) {
      parts.back() += rules[++i];
    } else if (in_class) {
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
    } else if (c == '(' || c == '{') {
      ++depth;
    } else if (c == ')' || c == '}') {
      depth = std::max(0, depth - 1);
    }
  }
  return parts;
}

std::string FirstNames(const std::vector<std::string>& names) {
  constexpr size_t kMost = 10;
  const size_t shown = std::min(names.size(), kMost);
  return absl::StrCat(absl::StrJoin(names.begin(), names.begin() + shown, ", "),
                      names.size() > shown ? ", …" : "");
}

absl::StatusOr<NameMap> NameMap::Parse(absl::string_view rules) {
  NameMap map;
  if (rules.empty()) return map;
  for (std::string& text : SplitRules(rules)) {
    const size_t equals = text.rfind('=');
    if (equals == std::string::npos || equals == 0) {
      return OptionError(kOption, text, "is not of the form OLD=NEW, OLD a regular expression");
    }
    const std::string old = text.substr(0, equals);
    int groups = 0;
    Rule rule{.text = text, .old = {}, .replacement = Replacement(text.substr(equals + 1), groups)};
    try {
      rule.old = std::regex(old, std::regex::ECMAScript);
    } catch (const std::regex_error& error) {
      return OptionError(
          kOption, text,
          absl::StrCat("has no valid regular expression '", old, "' (ECMAScript): ", error.what()));
    }
    if (groups > static_cast<int>(rule.old.mark_count())) {
      return OptionError(kOption, text,
                         absl::StrCat("names group ", groups, ", and '", old, "' has ",
                                      rule.old.mark_count(), " in parentheses"));
    }
    map.rules_.push_back(std::move(rule));
  }
  return map;
}

absl::StatusOr<std::vector<std::string>> NameMap::Apply(
    const std::vector<std::string>& names) const {
  std::vector<std::string> mapped = names;
  for (const Rule& rule : rules_) {
    bool has_matched = false;
    try {
      for (std::string& name : mapped) {
        if (name.size() > kMostMatched || !std::regex_search(name, rule.old)) continue;
        has_matched = true;
        name = std::regex_replace(name, rule.old, rule.replacement);
      }
    } catch (const std::regex_error& error) {
      return OptionError(kOption, rule.text, absl::StrCat("cannot be matched: ", error.what()));
    }
    if (!has_matched) {
      return OptionError(
          kOption, rule.text,
          absl::StrCat("matches none of the ", names.size(), " names: ", FirstNames(mapped)));
    }
  }
  std::map<std::string, size_t> seen;
  for (size_t i = 0; i < mapped.size() && !rules_.empty(); ++i) {
    const auto [other, is_new] = seen.emplace(mapped[i], i);
    if (is_new) continue;
    const auto text = [](std::string* out, const Rule& rule) { absl::StrAppend(out, rule.text); };
    return OptionError(kOption, absl::StrJoin(rules_, ",", text),
                       absl::StrCat("makes one name of two: '", names[other->second], "' and '",
                                    names[i], "' become '", mapped[i], "'"));
  }
  return mapped;
}

}  // namespace ddp::checkpoint
