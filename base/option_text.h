// Conversion of option values from and to text, for command lines, files and logs.
//
//   double lr;
//   absl::Status status = ParseOption("0.1", lr);   // for "x": "is not a finite number"
//   std::string text = FormatOption(lr);            // "0.1", the shortest text that parses to lr
//
// ParseOption inverts FormatOption, except for strings inside vectors that contain a comma or outer
// blanks, and for an optional string "auto". Functions are thread-safe.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp {

// An enum can be an option if an overload in its namespace names its values:
//
//   constexpr auto OptionNames(Color) {
//     return std::to_array<std::pair<absl::string_view, Color>>({{"red", Color::kRed}});
//   }
template <typename T>
concept NamedEnum = std::is_enum_v<T> && requires(T value) {
  OptionNames(value);
};

// InvalidArgument (NotFound for enums). The message is the problem alone, without the option's
// name: "is not a whole number". On an error `value` is unspecified.
absl::Status ParseOption(absl::string_view text, bool& value);
absl::Status ParseOption(absl::string_view text, int& value);
absl::Status ParseOption(absl::string_view text, int64_t& value);
absl::Status ParseOption(absl::string_view text, double& value);
absl::Status ParseOption(absl::string_view text, std::string& value);
// A plain number is in seconds; also "90s", "5m", "1h30m" (absl::ParseDuration).
absl::Status ParseOption(absl::string_view text, absl::Duration& value);

std::string FormatOption(bool value);
std::string FormatOption(int64_t value);
inline std::string FormatOption(int value) { return FormatOption(int64_t{value}); }
std::string FormatOption(double value);
inline std::string FormatOption(const std::string& value) { return value; }
// Returns the seconds as a number.
std::string FormatOption(absl::Duration value);

// The elements of "[a, b]" or "a,b", stripped of blanks; empty for "" and "[]". InvalidArgument for
// unbalanced brackets and empty elements.
absl::StatusOr<std::vector<std::string>> SplitOptionList(absl::string_view text);

template <NamedEnum T>
absl::Status ParseOption(absl::string_view text, T& value) {
  std::vector<absl::string_view> names;
  for (const auto& [name, candidate] : OptionNames(T{})) {
    if (name == text) {
      value = candidate;
      return absl::OkStatus();
    }
    names.push_back(name);
  }
  return absl::NotFoundError(absl::StrCat("is none of ", absl::StrJoin(names, ", ")));
}

template <NamedEnum T>
std::string FormatOption(T value) {
  for (const auto& [name, candidate] : OptionNames(T{})) {
    if (candidate == value) return std::string(name);
  }
  return absl::StrCat(static_cast<int64_t>(value));
}

// "auto" and "" mean nullopt.
template <typename T>
absl::Status ParseOption(absl::string_view text, std::optional<T>& value) {
  if (text.empty() || text == "auto") {
    value.reset();
    return absl::OkStatus();
  }
  T parsed{};
  absl::Status status = ParseOption(text, parsed);
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(status.message(), " (or auto)"));
  }
  value = std::move(parsed);
  return absl::OkStatus();
}

template <typename T>
std::string FormatOption(const std::optional<T>& value) {
  return value ? FormatOption(*value) : "auto";
}

template <typename T>
absl::Status ParseOption(absl::string_view text, std::vector<T>& value) {
  absl::StatusOr<std::vector<std::string>> parts = SplitOptionList(text);
  if (!parts.ok()) return parts.status();
  std::vector<T> parsed;
  for (const std::string& part : *parts) {
    T element{};
    if (absl::Status status = ParseOption(part, element); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("has element '", part, "', which ", status.message()));
    }
    parsed.push_back(std::move(element));
  }
  value = std::move(parsed);
  return absl::OkStatus();
}

template <typename T>
std::string FormatOption(const std::vector<T>& value) {
  return absl::StrCat("[",
                      absl::StrJoin(value, ", ",
                                    [](std::string* out, const T& element) {
                                      absl::StrAppend(out, FormatOption(element));
                                    }),
                      "]");
}

}  // namespace ddp
