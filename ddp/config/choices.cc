#include "ddp/config/choices.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "ddp/config/references.h"

namespace ddp::config {
namespace {

// No queue takes this many jobs.
constexpr double kMostValues = 1e4;

// The parts of `text` between commas outside of brackets and quotes, stripped of blanks.
absl::StatusOr<std::vector<absl::string_view>> SplitAtCommas(absl::string_view text) {
  std::vector<absl::string_view> parts;
  std::string closers;  // of the brackets that are open
  char quote = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    if (i == text.size()) {
      if (quote != 0) {
        return absl::InvalidArgumentError(
            "has a quote without an end; a text with a quote in it stands in quotes of the other "
            "kind");
      }
      if (!closers.empty()) return absl::InvalidArgumentError("has a bracket without an end");
    }
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '\'' || c == '"') {
      quote = c;
    } else if (c == '[' || c == '(' || c == '{') {
      closers += c == '[' ? ']' : c == '(' ? ')' : '}';
    } else if (c == ']' || c == ')' || c == '}') {
      if (closers.empty() || closers.back() != c) {
        return absl::InvalidArgumentError(absl::StrCat("has a '", std::string(1, c), "' too many"));
      }
      closers.pop_back();
    } else if (c == ',' && closers.empty()) {
      parts.push_back(absl::StripAsciiWhitespace(text.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  return parts;
}

// If `text` is NAME(…), reduces it to the text between the parentheses.
bool ConsumeCall(absl::string_view name, absl::string_view& text) {
  absl::string_view rest = absl::StripAsciiWhitespace(text);
  if (!absl::ConsumePrefix(&rest, name) || !absl::ConsumePrefix(&rest, "(") ||
      !absl::ConsumeSuffix(&rest, ")")) {
    return false;
  }
  text = rest;
  return true;
}

// "cpu:gloo" or "cuda:nccl", but not "cuda:0".
bool IsDeviceEntry(absl::string_view part) {
  return (absl::ConsumePrefix(&part, "cpu:") || absl::ConsumePrefix(&part, "cuda:")) &&
         !part.empty() && absl::ascii_isalpha(static_cast<unsigned char>(part[0]));
}

bool IsList(absl::string_view part) {
  return absl::StartsWith(part, "[") && absl::EndsWith(part, "]");
}

absl::StatusOr<std::vector<std::string>> Range(const std::vector<absl::string_view>& bounds) {
  if (bounds.size() < 2 || bounds.size() > 3) {
    return absl::InvalidArgumentError(
        "is a range without a start and an end: give range(start,stop) or range(start,stop,step)");
  }
  bool whole = true;
  std::vector<double> numbers;
  for (absl::string_view bound : bounds) {
    double number = 0;
    if (!absl::SimpleAtod(bound, &number) || !std::isfinite(number)) {
      return absl::InvalidArgumentError(
          absl::StrCat("is a range with '", bound, "', which is not a number"));
    }
    int64_t integer = 0;
    whole = whole && absl::SimpleAtoi(bound, &integer);
    numbers.push_back(number);
  }
  const double step = numbers.size() == 3 ? numbers[2] : 1;
  if (step == 0) return absl::InvalidArgumentError("is a range without end: its step is 0");
  // What rounding makes of (stop - start) / step is no further value.
  const double count = std::ceil((numbers[1] - numbers[0]) / step - 1e-9);
  if (count < 1) return absl::InvalidArgumentError("is an empty range");
  if (count > kMostValues) {
    return absl::InvalidArgumentError(absl::StrCat("is a range of ", count, " values"));
  }
  std::vector<std::string> values;
  values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    const double value = numbers[0] + static_cast<double>(i) * step;
    // 12 digits give 0.3, not 0.30000000000000004.
    values.push_back(whole ? absl::StrCat(static_cast<int64_t>(value))
                           : absl::StrFormat("%.12g", value));
  }
  return values;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseChoices(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  const bool is_range = ConsumeCall("range", text);
  if (!is_range) ConsumeCall("choice", text);
  if (absl::StripAsciiWhitespace(text).empty()) {
    return absl::InvalidArgumentError(is_range ? "is a range without an end" : "has no choices");
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<absl::string_view> parts, SplitAtCommas(text));
  if (is_range) return Range(parts);
  std::vector<std::string> choices;
  for (absl::string_view part : parts) {
    if (part.empty()) return absl::InvalidArgumentError("has an empty choice");
    choices.push_back(Unquoted(part));
  }
  return choices;
}

bool CommasAreOfTheValue(absl::string_view text, OptionKind kind) {
  const absl::StatusOr<std::vector<absl::string_view>> parts = SplitAtCommas(text);
  if (!parts.ok() || parts->size() < 2) return false;
  if (kind == OptionKind::kList) return !std::all_of(parts->begin(), parts->end(), IsList);
  return kind == OptionKind::kText && std::all_of(parts->begin(), parts->end(), IsDeviceEntry);
}

absl::string_view UnknownSweepFunction(absl::string_view text) {
  const absl::string_view call = absl::StripAsciiWhitespace(text);
  if (!absl::EndsWith(call, ")")) return "";
  // Those of hydra's grammar and of its sweepers.
  for (absl::string_view name : {"interval", "glob", "shuffle", "sort", "tag", "extend_list"}) {
    if (absl::StartsWith(call, absl::StrCat(name, "("))) return name;
  }
  return "";
}

std::string NoSuchSweepFunction(absl::string_view name) {
  return absl::StrCat("calls ", name,
                      "(), which sweeps do not have here: give choice(a, b) or range(start, stop, "
                      "step), or quotes around a text");
}

std::string Unquoted(absl::string_view text) {
  if (text.size() < 2 || (text[0] != '\'' && text[0] != '"') || text.back() != text[0]) {
    return std::string(text);
  }
  const char quote = text[0];
  std::string value;
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    // A quote within means that the outer ones are not a pair, but for ''.
    if (text[i] == quote && (quote == '"' || text[++i] != quote || i + 1 == text.size())) {
      return std::string(text);
    }
    value += text[i];
  }
  return value;
}

std::string Quoted(absl::string_view value) {
  const bool as_it_is = value.empty() || (value[0] != '\'' && value[0] != '"');
  if (as_it_is && !HasReferences(value)) return std::string(value);
  return absl::StrCat("'", absl::StrReplaceAll(value, {{"'", "''"}}), "'");
}

bool LooksLikeChoices(absl::string_view text, OptionKind kind) {
  // A call without its closing parenthesis counts, too: ParseChoices reports it.
  const absl::string_view call = absl::StripAsciiWhitespace(text);
  if (absl::StartsWith(call, "range(") || absl::StartsWith(call, "choice(")) return true;
  const absl::StatusOr<std::vector<absl::string_view>> parts = SplitAtCommas(text);
  // Nor can its commas be told apart if a quote or bracket has no end: that is reported likewise.
  if (!parts.ok()) return absl::StrContains(text, ',');
  return parts->size() > 1 && !CommasAreOfTheValue(text, kind);
}

}  // namespace ddp::config
