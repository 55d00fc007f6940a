// Maps the names of a checkpoint's tensors to those of a model, by regular expressions.
//
//   DDP_ASSIGN_OR_RETURN(NameMap map,
//   NameMap::Parse(R"(^backbone\.=encoder.,\.ln(\d)\.=.norm$1.)"));
//   DDP_ASSIGN_OR_RETURN(std::vector<std::string> mapped, map.Apply({"backbone.ln1.weight"}));
//   // encoder.norm1.weight
#pragma once

#include <cstddef>
#include <regex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint {

// The first ten names, separated by commas, and "…" if there are more. Thread-safe.
std::string FirstNames(const std::vector<std::string>& names);

// Names that are longer are matched by no rule: std::regex recurses once per character.
inline constexpr size_t kMostMatched = 1000;

// Rules that have regular expressions, at commas that are not in brackets or after a backslash. A
// class, as in [(,], hides other brackets. Thread-safe.
std::vector<std::string> SplitRules(absl::string_view rules);

// Copyable. Thread-safe.
class NameMap {
 public:
  // Maps each name to itself.
  NameMap() = default;

  // "OLD=NEW,…": OLD is a regular expression of ECMAScript, NEW what replaces each place in a name
  // that it matches; $1 or \1 in it is what the first group has matched, $& the whole match. Rules
  // are separated by commas, but for those in brackets or after a backslash; the last "=" of a rule
  // separates OLD and NEW, which may be empty. Each rule is applied to what the one before it has
  // made. OptionError for init_map, with the rule: no "=", an invalid expression, a group in NEW
  // that OLD lacks.
  static absl::StatusOr<NameMap> Parse(absl::string_view rules);

  bool empty() const { return rules_.empty(); }

  // The names, all different, in the order of `names`. OptionError for init_map: a rule that
  // matches no name, two names that would become one, or an expression that takes too long.
  absl::StatusOr<std::vector<std::string>> Apply(const std::vector<std::string>& names) const;

 private:
  struct Rule {
    std::string text;  // OLD=NEW
    std::regex old;
    std::string replacement;  // in ECMAScript's form
  };

  std::vector<Rule> rules_;
};

}  // namespace ddp::checkpoint
