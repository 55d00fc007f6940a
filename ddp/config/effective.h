// The configuration that is in effect, as text.
//
//   std::string yaml = ToYaml(list);            // "optimizer:\n  name: sgd\n  lr: 0.1\n…"
//   std::string id = Identity(list, defaults, {"log_dir"});
//   for (const OptionDifference& one : Differences(list, yaml, yaml_of_another_run)) …
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/option_list.h"

namespace ddp::config {

// All options by their paths, as YAML that ReadConfigFile reads back to the same values, and PyYAML
// to values of the same types. Texts that YAML would take for a number, a bool or null are quoted.
// An element of a list that has a comma outside of brackets is not read back. Thread-compatible:
// may set a list to another value for a moment.
std::string ToYaml(const OptionList& list);

// 32 hexadecimal digits: a hash of the paths and values of the options that differ from `defaults`,
// the Table() of the list as the program makes it, but for those in `without` and the incidental
// ones (OptionSpec::Incidental) that are not in `compared`. Equal for two runs that compute the
// same, also by a later program that has more options. Thread-safe.
std::string Identity(const OptionList& list,
                     const std::vector<std::pair<std::string, std::string>>& defaults,
                     const std::set<std::string>& without,
                     const std::set<std::string>& compared = {});

// The values in a text of ToYaml, by the paths of the options; lists as "[a, b]". nullopt: it is no
// YAML. Thread-safe.
std::optional<std::map<std::string, std::string>> ValuesIn(const std::string& yaml);

// An option that two runs have set otherwise.
struct OptionDifference {
  std::string path;
  std::string now;
  std::string then;
};

// The options of `list` that have other values in `then` than in `now`, two texts of ToYaml, in
// the order of the list. Left out are the incidental ones, and those that one of both does not
// have, as the text of an earlier version of the program. Empty for what is no YAML. Thread-safe.
std::vector<OptionDifference> Differences(const OptionList& list, const std::string& now,
                                          const std::string& then);

}  // namespace ddp::config
