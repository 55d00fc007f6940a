#include "ddp/config/references.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/environment.h"
#include "base/status.h"

namespace ddp::config {
namespace {

constexpr absl::string_view kBegin = "${";
// Each level of defaults in defaults is a call of its own.
constexpr int kMostLevels = 16;

// The position of the '}' of a reference whose inside begins at `begin`.
size_t EndOf(absl::string_view text, size_t begin) {
  int open = 1;
  for (size_t i = begin; i < text.size(); ++i) {
    open += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
    if (open == 0) return i;
  }
  return absl::string_view::npos;
}

using Lookup = std::function<absl::StatusOr<std::string>(absl::string_view name)>;

absl::StatusOr<std::string> Replace(absl::string_view text, const Lookup& lookup, int level);

absl::StatusOr<std::string> Variable(absl::string_view inside, const Lookup& lookup, int level) {
  const size_t comma = inside.find(',');
  const absl::string_view name = absl::StripAsciiWhitespace(inside.substr(0, comma));
  const auto variables = Environment::FromProcess().variables();
  const auto variable = variables.find(std::string(name));
  if (variable != variables.end()) return variable->second;
  if (comma == absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("has '${oc.env:", name,
                                                   "}', but the environment has no ", name,
                                                   "; a default: ${oc.env:", name, ",VALUE}"));
  }
  return Replace(absl::StripAsciiWhitespace(inside.substr(comma + 1)), lookup, level + 1);
}

absl::StatusOr<std::string> Replace(absl::string_view text, const Lookup& lookup, int level) {
  if (level > kMostLevels) return absl::InvalidArgumentError("has too many levels of references");
  std::string result;
  while (true) {
    const size_t begin = text.find(kBegin);
    if (begin == absl::string_view::npos) return absl::StrCat(result, text);
    if (begin > 0 && text[begin - 1] == '\\') {
      absl::StrAppend(&result, text.substr(0, begin - 1), kBegin);
      text.remove_prefix(begin + kBegin.size());
      continue;
    }
    absl::StrAppend(&result, text.substr(0, begin));
    text.remove_prefix(begin);
    const size_t end = EndOf(text, kBegin.size());
    if (end == absl::string_view::npos) {
      return absl::InvalidArgumentError("has a '${' without its '}'; in quotes it is text");
    }
    const absl::string_view inside =
        absl::StripAsciiWhitespace(text.substr(kBegin.size(), end - kBegin.size()));
    absl::string_view variable = inside;
    absl::StatusOr<std::string> value;
    if (absl::ConsumePrefix(&variable, "oc.env:")) {
      value = Variable(variable, lookup, level);
    } else if (inside.find_first_of(":{}$") != absl::string_view::npos) {
      value = absl::InvalidArgumentError(absl::StrCat(
          "has '", text.substr(0, end + 1),
          "', but only ${oc.env:NAME} and ${OPTION} are replaced here; in quotes it is "
          "text"));
    } else {
      value = lookup(inside);
    }
    if (!value.ok()) return value.status();
    absl::StrAppend(&result, *value);
    text.remove_prefix(end + 1);
  }
}

}  // namespace

bool HasReferences(absl::string_view text) { return absl::StrContains(text, kBegin); }

absl::StatusOr<std::string> ReplaceReferences(absl::string_view text, const Lookup& lookup) {
  return Replace(text, lookup, 0);
}

absl::Status SetReferences(const std::map<std::string, OptionAssignment>& assignments,
                           const OptionList& list, OptionSetter& setter) {
  std::map<std::string, const OptionAssignment*> pending;
  for (const auto& [path, assignment] : assignments) pending[path] = &assignment;
  std::vector<std::string> open;  // options whose references are being replaced
  const std::function<absl::Status(const OptionAssignment&)> replace =
      [&](const OptionAssignment& assignment) -> absl::Status {
    open.push_back(assignment.path);
    const auto value_of = [&](absl::string_view name) -> absl::StatusOr<std::string> {
      const absl::StatusOr<const OptionRef*> option = list.Find(name);
      if (!option.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("has '${", name, "}', but ", option.status().message()));
      }
      const std::string& path = (*option)->path;
      if (std::find(open.begin(), open.end(), path) != open.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "has references in a circle: ", absl::StrJoin(open, " -> "), " -> ", path));
      }
      if (const auto it = pending.find(path); it != pending.end()) {
        DDP_RETURN_IF_ERROR(replace(*it->second));
      }
      return (*option)->get();
    };
    const absl::StatusOr<std::string> value = ReplaceReferences(assignment.value, value_of);
    if (!value.ok()) {
      // An error in the value that is referred to has its place.
      const bool has_place = !absl::StartsWith(value.status().message(), "has ");
      return absl::Status(value.status().code(),
                          has_place ? std::string(value.status().message())
                                    : absl::StrCat(assignment.written, "=", assignment.value, " ",
                                                   value.status().message()));
    }
    DDP_RETURN_IF_ERROR(setter.Set({assignment.path, *value, assignment.written}, list));
    pending.erase(assignment.path);
    open.pop_back();
    return absl::OkStatus();
  };
  while (!pending.empty()) DDP_RETURN_IF_ERROR(replace(*pending.begin()->second));
  return absl::OkStatus();
}

}  // namespace ddp::config
