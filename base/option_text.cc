#include "base/option_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ddp {

absl::Status ParseOption(absl::string_view text, bool& value) {
  for (absl::string_view word : {"true", "1", "yes", "on"}) {
    if (absl::EqualsIgnoreCase(text, word)) {
      value = true;
      return absl::OkStatus();
    }
  }
  for (absl::string_view word : {"false", "0", "no", "off"}) {
    if (absl::EqualsIgnoreCase(text, word)) {
      value = false;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError("is neither true nor false");
}

absl::Status ParseOption(absl::string_view text, int& value) {
  int64_t wide = 0;
  if (absl::Status status = ParseOption(text, wide); !status.ok()) return status;
  if (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(wide < 0 ? "is too small a number" : "is too large a number");
  }
  value = static_cast<int>(wide);
  return absl::OkStatus();
}

absl::Status ParseOption(absl::string_view text, int64_t& value) {
  if (absl::SimpleAtoi(text, &value)) return absl::OkStatus();
  absl::string_view digits = text;
  const bool is_negative = absl::ConsumePrefix(&digits, "-");
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit)) {
    return absl::InvalidArgumentError("is not a whole number");
  }
  return absl::InvalidArgumentError(is_negative ? "is too small a number"
                                                : "is too large a number");
}

absl::Status ParseOption(absl::string_view text, double& value) {
  double parsed = 0;
  if (!absl::SimpleAtod(text, &parsed) || !std::isfinite(parsed)) {
    return absl::InvalidArgumentError("is not a finite number");
  }
  value = parsed;
  return absl::OkStatus();
}

absl::Status ParseOption(absl::string_view text, std::string& value) {
  value = std::string(text);
  return absl::OkStatus();
}

absl::Status ParseOption(absl::string_view text, absl::Duration& value) {
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds) && std::isfinite(seconds)) {
    value = absl::Seconds(seconds);
    return absl::OkStatus();
  }
  absl::Duration parsed;
  if (absl::ParseDuration(text, &parsed) && parsed != absl::InfiniteDuration() &&
      parsed != -absl::InfiniteDuration()) {
    value = parsed;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("is no finite time: give seconds, or 90s, 5m, 1h30m");
}

std::string FormatOption(bool value) { return value ? "true" : "false"; }

std::string FormatOption(int64_t value) { return absl::StrCat(value); }

std::string FormatOption(double value) {
  // StrCat would write 10000000 as "1e+07".
  constexpr double kMostDigits = 1e15;
  if (value == std::trunc(value) && std::abs(value) < kMostDigits) {
    return absl::StrCat(static_cast<int64_t>(value));
  }
  // StrCat writes "0.0005" where to_chars writes "5e-04". It is used where its six digits suffice.
  double parsed = 0;
  std::string short_text = absl::StrCat(value);
  if (absl::SimpleAtod(short_text, &parsed) && parsed == value) return short_text;
  std::array<char, 32> text;
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), end);
}

std::string FormatOption(absl::Duration value) {
  return FormatOption(absl::ToDoubleSeconds(value));
}

namespace {

// Whether each bracket has its other one.
bool IsBalanced(absl::string_view text) {
  int open = 0;
  for (const char c : text) {
    open += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (open < 0) return false;
  }
  return open == 0;
}

// The parts between commas outside of brackets; between all commas if brackets are not balanced.
std::vector<absl::string_view> SplitAtCommas(absl::string_view text) {
  std::vector<absl::string_view> parts;
  const bool balanced = IsBalanced(text);
  int open = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    open += text[i] == '[' ? 1 : text[i] == ']' ? -1 : 0;
    if (text[i] != ',' || (balanced && open > 0)) continue;
    parts.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> SplitOptionList(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  const bool opens = absl::StartsWith(text, "["), closes = absl::EndsWith(text, "]");
  if (opens && closes && text.size() > 1) {
    text = text.substr(1, text.size() - 2);
  } else if ((opens || closes) && !IsBalanced(text)) {
    return absl::InvalidArgumentError("has only one of the brackets of a list, as in [a, b]");
  }
  std::vector<std::string> parts;
  if (absl::StripAsciiWhitespace(text).empty()) return parts;
  for (absl::string_view part : SplitAtCommas(text)) {
    part = absl::StripAsciiWhitespace(part);
    if (part.empty()) return absl::InvalidArgumentError("has an empty element");
    parts.emplace_back(part);
  }
  return parts;
}

}  // namespace ddp
