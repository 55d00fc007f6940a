#include "ddp/trainer/taken_options.h"

#include <algorithm>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"

namespace ddp::trainer {

absl::Status CheckTaken(const OptionList& given, const OptionList& defaults,
                        const TakenOptions& taken) {
  std::map<std::string, std::string> standard;
  for (const auto& [path, value] : defaults.Table()) standard.emplace(path, value);
  std::vector<std::string> has = taken.takes;
  for (const auto& [path, value] : given.Table()) {
    if (absl::StartsWith(path, absl::StrCat(taken.name, "."))) has.push_back(path);
  }
  const auto contains = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const auto& [path, value] : given.Table()) {
    const auto unchanged = standard.find(path);
    if (contains(has, path) || contains(taken.of_all, path) ||
        (unchanged != standard.end() && unchanged->second == value)) {
      continue;
    }
    return OptionError(path, value,
                       absl::StrCat("is no option of ", taken.name, ", which has ",
                                    has.empty() ? "none" : absl::StrJoin(has, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace ddp::trainer
