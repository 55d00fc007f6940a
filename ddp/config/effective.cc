#include "ddp/config/effective.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/digest.h"
#include "base/option_text.h"

namespace ddp::config {
namespace {

// Whether YAML reads `text` as the same string, without quotes.
bool IsPlain(absl::string_view text) {
  if (text.empty() || text == "~") return false;
  for (absl::string_view word : {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}) {
    if (absl::EqualsIgnoreCase(text, word)) return false;
  }
  double number = 0;
  // This includes what only some readers take for a number: 1_000, 0x1F, 12:30, .5, 2026-11-23.
  const unsigned char first = static_cast<unsigned char>(text[0]);
  if (absl::SimpleAtod(text, &number) || absl::ascii_isdigit(first)) return false;
  if (!absl::ascii_isalpha(first) && first != '/' && first != '_' && first != '.') return false;
  for (const unsigned char c : text) {
    if (!absl::ascii_isalnum(c) && !absl::StrContains("/_.+-:=@%,", static_cast<char>(c))) {
      return false;
    }
  }
  return text.back() != ':' && !absl::StrContains(text, ": ");
}

// Bytes above 127 are UTF-8, which YAML's double quotes take as they are.
std::string Quoted(absl::string_view text) {
  return IsPlain(text) ? std::string(text) : absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\"");
}

std::string Scalar(const OptionRef& option) {
  const std::string value = option.get();
  switch (option.kind) {
    case OptionKind::kBool:
    case OptionKind::kNumber:
      return value;
    case OptionKind::kText:
      return Quoted(value);
    case OptionKind::kList:
      break;
  }
  const absl::StatusOr<std::vector<std::string>> elements = SplitOptionList(value);
  if (!elements.ok()) return Quoted(value);
  const auto append = [](std::string* out, const std::string& element) {
    double number = 0;
    absl::StrAppend(out, absl::SimpleAtod(element, &number) ? element : Quoted(element));
  };
  return absl::StrCat("[", absl::StrJoin(*elements, ", ", append), "]");
}

// A level of the nested map, in order of first appearance.
struct Level {
  std::vector<std::pair<std::string, Level>> children = {};
  const OptionRef* option = nullptr;

  Level& Child(const std::string& name) {
    for (auto& [existing, level] : children) {
      if (existing == name) return level;
    }
    return children.emplace_back(name, Level()).second;
  }

  void AppendTo(std::string& text, int indent) const {
    for (const auto& [name, level] : children) {
      absl::StrAppend(&text, std::string(indent, ' '), name, ":");
      if (level.option != nullptr) absl::StrAppend(&text, " ", Scalar(*level.option));
      text += '\n';
      level.AppendTo(text, indent + 2);
    }
  }
};

}  // namespace

std::string ToYaml(const OptionList& list) {
  Level root;
  for (const OptionRef& option : list.options()) {
    Level* level = &root;
    for (absl::string_view name : absl::StrSplit(option.path, '.')) {
      level = &level->Child(std::string(name));
    }
    level->option = &option;
  }
  std::string text;
  root.AppendTo(text, 0);
  return text;
}

std::string Identity(const OptionList& list, const std::set<std::string>& without) {
  std::string text;
  for (const OptionRef& option : list.options()) {
    if (option.incidental || without.count(option.path) > 0) continue;
    absl::StrAppend(&text, option.path, "=", option.get(), "\n");
  }
  return Digest(text);
}

}  // namespace ddp::config
