// The configuration that is in effect, as text.
//
//   std::string yaml = ToYaml(list);            // "optimizer:\n  name: sgd\n  lr: 0.1\n…"
//   std::string id = Identity(list, {"log_dir"});
#pragma once

#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "base/option_list.h"

namespace ddp::config {

// All options by their paths, as YAML that ReadConfigFile reads back to the same values. Texts that
// YAML would take for a number, a bool or null are quoted. Thread-safe.
std::string ToYaml(const OptionList& list);

// 32 hexadecimal digits: a hash of the paths and values of all options but the incidental ones
// (OptionSpec::Incidental) and those in `without`. Equal for two runs that compute the same.
// Thread-safe.
std::string Identity(const OptionList& list, const std::set<std::string>& without);

}  // namespace ddp::config
