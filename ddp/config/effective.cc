#include "ddp/config/effective.h"

#include <algorithm>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/digest.h"
#include "base/option_text.h"
#include "yaml-cpp/yaml.h"

namespace ddp::config {
namespace {

// Whether YAML, 1.1 as well as 1.2, reads `text` as the same string without quotes; `others` may
// stand in it beside letters, digits and '_'.
bool IsPlain(absl::string_view text, absl::string_view others) {
  if (text.empty()) return false;
  for (absl::string_view word : {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}) {
    if (absl::EqualsIgnoreCase(text, word)) return false;
  }
  // What begins with a letter is no number: not 1e3, 1_000, 0x1F, 12:30, .5, .inf or 2026-11-23.
  const unsigned char first = static_cast<unsigned char>(text[0]);
  if (!absl::ascii_isalpha(first) && first != '/' && first != '_') return false;
  for (const unsigned char c : text) {
    if (!absl::ascii_isalnum(c) && c != '_' && !absl::StrContains(others, static_cast<char>(c))) {
      return false;
    }
  }
  return text.back() != ':';
}

constexpr absl::string_view kPlainValue = "/.+-:=@%,";
// Commas separate elements, and a colon may make a map of one.
constexpr absl::string_view kPlainElement = "/.+-=@%";

// The number of the bytes, of a character of UTF-8, that YAML takes for a line break or not at all
// in a text; 0 if `text` begins with another character.
size_t SpecialBytes(absl::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (at(0) < 0x20 || at(0) == 0x7F) return 1;
  if (text.size() >= 2 && at(0) == 0xC2 && at(1) < 0xA0) return 2;  // U+0080 to U+009F
  if (text.size() < 3) return 0;
  const bool separator = at(0) == 0xE2 && at(1) == 0x80 && (at(2) == 0xA8 || at(2) == 0xA9);
  const bool mark = at(0) == 0xEF && at(1) == 0xBB && at(2) == 0xBF;          // U+FEFF
  const bool no_character = at(0) == 0xEF && at(1) == 0xBF && at(2) >= 0xBE;  // U+FFFE, U+FFFF
  return separator || mark || no_character ? 3 : 0;
}

// The code point of `bytes`, one character of UTF-8 of at most three bytes.
unsigned CodePoint(absl::string_view bytes) {
  unsigned code = static_cast<unsigned char>(bytes[0]);
  if (bytes.size() > 1) code &= bytes.size() == 2 ? 0x1F : 0x0F;
  for (size_t i = 1; i < bytes.size(); ++i) {
    code = code << 6 | (static_cast<unsigned char>(bytes[i]) & 0x3F);
  }
  return code;
}

// `text` in double quotes, with YAML's escapes, which differ from C's.
std::string InQuotes(absl::string_view text) {
  std::string quoted = "\"";
  while (!text.empty()) {
    const size_t special = SpecialBytes(text);
    if (special > 0) {
      const unsigned code = CodePoint(text.substr(0, special));
      absl::StrAppend(&quoted, code == '\n'   ? "\\n"
                               : code == '\t' ? "\\t"
                               : code < 0x100 ? absl::StrFormat("\\x%02x", code)
                                              : absl::StrFormat("\\u%04x", code));
      text.remove_prefix(special);
      continue;
    }
    if (text[0] == '"' || text[0] == '\\') quoted += '\\';
    quoted += text[0];
    text.remove_prefix(1);
  }
  return quoted + '"';
}

std::string Text(absl::string_view text, absl::string_view others) {
  return IsPlain(text, others) ? std::string(text) : InQuotes(text);
}

// A number as YAML 1.1 reads it: there "1e-05" is a text, and 1.0e-05 a number.
std::string Number(const std::string& text) {
  const size_t exponent = text.find('e');
  double number = 0;
  if (exponent == std::string::npos || absl::StrContains(text, '.') ||
      !absl::SimpleAtod(text, &number)) {
    return text;
  }
  return absl::StrCat(text.substr(0, exponent), ".0", text.substr(exponent));
}

// Whether a list has elements that are numbers. Sets the option for that, and puts it back.
bool IsOfNumbers(const OptionRef& list) {
  const std::string value = list.get();
  const bool takes_text = list.set("[x]").ok();
  if (takes_text) list.set(value).IgnoreError();
  return !takes_text;
}

std::string Scalar(const OptionRef& option) {
  const std::string value = option.get();
  if (option.kind == OptionKind::kBool || option.kind == OptionKind::kNumber) return Number(value);
  if (option.kind == OptionKind::kText) return Text(value, kPlainValue);
  const absl::StatusOr<std::vector<std::string>> elements = SplitOptionList(value);
  if (!elements.ok()) return InQuotes(value);
  double number = 0;
  const bool has_number =
      std::any_of(elements->begin(), elements->end(),
                  [&](const std::string& element) { return absl::SimpleAtod(element, &number); });
  const bool numbers = has_number && IsOfNumbers(option);
  const auto append = [&](std::string* out, const std::string& element) {
    absl::StrAppend(out, numbers ? Number(element) : Text(element, kPlainElement));
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

namespace {

// More levels than any option has. Anchors can make a document endless.
constexpr int kMostLevels = 32;

void AddValues(const YAML::Node& node, const std::string& path, int level,
               std::map<std::string, std::string>& values) {
  if (level > kMostLevels) return;
  if (node.IsMap()) {
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) continue;
      AddValues(entry.second, absl::StrCat(path, path.empty() ? "" : ".", entry.first.Scalar()),
                level + 1, values);
    }
  } else if (node.IsSequence()) {
    std::vector<std::string> elements;
    for (const auto& element : node) {
      elements.push_back(element.IsScalar() ? element.Scalar() : "…");
    }
    values[path] = absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
  } else {
    values[path] = node.IsScalar() ? node.Scalar() : "";
  }
}

// Versions of the program may write a number differently.
bool IsSame(const std::string& a, const std::string& b) {
  double x = 0, y = 0;
  return a == b || (absl::SimpleAtod(a, &x) && absl::SimpleAtod(b, &y) && x == y);
}

}  // namespace

std::optional<std::map<std::string, std::string>> ValuesIn(const std::string& yaml) {
  std::map<std::string, std::string> values;
  try {
    AddValues(YAML::Load(yaml), "", 0, values);
  } catch (const YAML::Exception&) {
    return std::nullopt;
  }
  return values;
}

std::string Identity(const OptionList& list,
                     const std::vector<std::pair<std::string, std::string>>& defaults,
                     const std::set<std::string>& without, const std::set<std::string>& compared) {
  std::map<std::string, std::string> values;  // by path: the order of declaration may change
  for (size_t i = 0; i < list.options().size(); ++i) {
    const OptionRef& option = list.options()[i];
    const bool counts = !option.incidental || compared.count(option.path) > 0;
    if (!counts || without.count(option.path) > 0) continue;
    const std::string value = option.get();
    const std::string& unset = defaults.at(i).second;
    // An optional that is unset has been written as "auto", and is as "".
    const bool is_default = value == unset || (value == "auto" && unset.empty());
    if (!is_default) values[option.path] = value;
  }
  Digester digester;
  for (const auto& [path, value] : values) {
    digester.AddField(path);
    digester.AddField(value);
  }
  return digester.Hex();
}

std::vector<OptionDifference> Differences(const OptionList& list, const std::string& now,
                                          const std::string& then) {
  const auto news = ValuesIn(now), olds = ValuesIn(then);
  std::vector<OptionDifference> differences;
  if (!news || !olds) return differences;
  for (const OptionRef& option : list.options()) {
    const auto is = news->find(option.path), was = olds->find(option.path);
    if (option.incidental || is == news->end() || was == olds->end()) continue;
    if (!IsSame(is->second, was->second)) {
      differences.push_back({option.path, is->second, was->second});
    }
  }
  return differences;
}

}  // namespace ddp::config
