#include "base/environment.h"

#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp {

Environment::Environment(std::initializer_list<std::pair<const std::string, std::string>> variables)
    : variables_(variables) {}

Environment::Environment(std::map<std::string, std::string> variables)
    : variables_(std::move(variables)) {}

Environment Environment::FromProcess() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    absl::string_view text = *entry;
    size_t equals = text.find('=');
    if (equals == absl::string_view::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return Environment(std::move(variables));
}

std::optional<std::string> Environment::Get(absl::string_view name) const {
  if (reads_ != nullptr) reads_->emplace(name);
  return Find(name);
}

std::optional<std::string> Environment::Find(absl::string_view name) const {
  auto it = variables_.find(std::string(name));
  if (it == variables_.end() || it->second.empty()) return std::nullopt;
  return it->second;
}

absl::StatusOr<int64_t> Environment::GetInt(absl::string_view name, int64_t min,
                                            int64_t max) const {
  std::optional<std::string> text = Get(name);
  if (!text) {
    return absl::NotFoundError(absl::StrCat("environment variable ", name, " is not set"));
  }
  int64_t value = 0;
  if (!absl::SimpleAtoi(*text, &value) || value < min || value > max) {
    return absl::InvalidArgumentError(absl::StrCat("environment variable ", name, "='", *text,
                                                   "' is not an integer in [", min, ", ", max,
                                                   "]"));
  }
  return value;
}

std::string Environment::Describe(const std::vector<std::string>& names) const {
  std::vector<std::string> set;
  for (const std::string& name : names) {
    const std::optional<std::string> value = Find(name);
    if (!value) continue;
    const auto is_odd = [](unsigned char c) { return !absl::ascii_isprint(c); };
    const bool plain = std::none_of(value->begin(), value->end(), is_odd);
    set.push_back(absl::StrCat(name, "=", plain ? *value : absl::CHexEscape(*value)));
  }
  return set.empty() ? "none" : absl::StrJoin(set, " ");
}

}  // namespace ddp
