// Declares the options of a struct, one line each. The struct is a plain aggregate with defaults;
// an overload of OptionsOf in its namespace gives names, help and ranges.
//
//   struct ScheduleOptions { std::string name = "constant"; int64_t warmup_steps = 0; };
//
//   constexpr auto OptionsOf(const ScheduleOptions&) {
//     return Options(Option("name", &ScheduleOptions::name, "schedule of the learning rate")
//                        .OneOf("constant", "cosine"),
//                    Option("warmup_steps", &ScheduleOptions::warmup_steps, "steps of warm-up")
//                        .AtLeast(0));
//   }
//   // In the OptionsOf of an enclosing struct:
//   //   Nested("schedule", &TrainerOptions::schedule, "learning rate over time")
//
//   DDP_RETURN_IF_ERROR(ValidateOptions(options));  // "warmup_steps=-1 must be at least 0"
//   OptionList list = ListOptions(options);         // for flags, help and logs
//
// Types: bool, int, int64_t, double, std::string, absl::Duration, enums with OptionNames, and
// std::optional and std::vector of these (base/option_text.h). Duplicate names in one list are a
// compile error. Functions are thread-safe.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/option_error.h"
#include "base/option_list.h"
#include "base/option_text.h"

namespace ddp {

// Bounds of a number (of a duration: in seconds) or allowed names of a string; for vectors and
// optionals, of their elements.
struct OptionBounds {
  static constexpr size_t kMostNames = 12;

  std::optional<double> least = std::nullopt;
  std::optional<double> above = std::nullopt;
  std::optional<double> most = std::nullopt;
  std::array<absl::string_view, kMostNames> names = {};
  size_t num_names = 0;
  std::vector<std::string> (*names_from)() = nullptr;  // called at each check, e.g. Registry::Names
  bool names_are_checked = true;                       // false: they are for the help alone

  // "at least 0, at most 1"; empty if there are none.
  std::string Describe() const;
  // Empty if the value is allowed; else the problem: "must be at least 0".
  std::string Problem(double value) const;
  std::string Problem(absl::string_view value) const;
  std::vector<std::string> Names() const;
};

// One line of an option list. Made by Option().
template <typename S, typename T>
struct OptionSpec {
  absl::string_view name;
  T S::*member;
  absl::string_view help;
  OptionBounds bounds = {};
  absl::string_view alias = {};
  bool incidental = false;
  OptionAcrossRanks across_ranks = OptionAcrossRanks::kSame;
  bool any_bytes = false;

  constexpr OptionSpec AtLeast(double least) const {
    OptionSpec spec = *this;
    spec.bounds.least = least;
    return spec;
  }
  constexpr OptionSpec Above(double above) const {
    OptionSpec spec = *this;
    spec.bounds.above = above;
    return spec;
  }
  constexpr OptionSpec AtMost(double most) const {
    OptionSpec spec = *this;
    spec.bounds.most = most;
    return spec;
  }
  template <typename... Names>
  constexpr OptionSpec OneOf(Names... names) const {
    static_assert(sizeof...(names) <= OptionBounds::kMostNames);
    OptionSpec spec = *this;
    spec.bounds.names = {absl::string_view(names)...};
    spec.bounds.num_names = sizeof...(names);
    return spec;
  }
  // Allows names that are known at run time only, such as those in a registry.
  constexpr OptionSpec OneOfThese(std::vector<std::string> (*names)()) const {
    OptionSpec spec = *this;
    spec.bounds.names_from = names;
    return spec;
  }
  // The help lists the names, as with OneOfThese, but values are not checked here: whether one is
  // allowed depends on other options.
  constexpr OptionSpec Lists(std::vector<std::string> (*names)()) const {
    OptionSpec spec = OneOfThese(names);
    spec.bounds.names_are_checked = false;
    return spec;
  }
  // An additional full name: "keep_checkpoints" for checkpoint.keep.
  constexpr OptionSpec Alias(absl::string_view name) const {
    OptionSpec spec = *this;
    spec.alias = name;
    return spec;
  }
  // The option does not affect results; for example an output path or a queue's time limit. A sweep
  // (ddp/config) ignores it in the identity of a job.
  constexpr OptionSpec Incidental() const {
    OptionSpec spec = *this;
    spec.incidental = true;
    return spec;
  }
  // The ranks of a job must have one value of an option (base/same_options.h), unless it has one of
  // the next two. The first is for what belongs to a rank or its machine, and for what counts on
  // rank 0 only.
  constexpr OptionSpec MayDiffer() const {
    OptionSpec spec = *this;
    spec.across_ranks = OptionAcrossRanks::kMayDiffer;
    return spec;
  }
  // A text such as a path, whose being set decides what the ranks do together, is set on all ranks
  // or on none, and its values may differ. "auto" counts as a value of its own.
  constexpr OptionSpec OnAllRanksOrNone() const {
    OptionSpec spec = *this;
    spec.across_ranks = OptionAcrossRanks::kAllRanksOrNone;
    return spec;
  }
  // A text that goes into no log or checkpoint need not be UTF-8.
  constexpr OptionSpec AnyBytes() const {
    OptionSpec spec = *this;
    spec.any_bytes = true;
    return spec;
  }
};

// `help` is a short phrase in lower case without a full stop.
template <typename S, typename T>
constexpr OptionSpec<S, T> Option(absl::string_view name, T S::*member, absl::string_view help) {
  return {name, member, help};
}

template <typename S, typename T>
struct NestedSpec {
  absl::string_view name;  // empty: no level of its own
  T S::*member;
  absl::string_view help;
  bool may_differ = false;

  // All its options, as with OptionSpec::MayDiffer.
  constexpr NestedSpec MayDiffer() const {
    NestedSpec spec = *this;
    spec.may_differ = true;
    return spec;
  }
};

// A nested struct with an option list: its options are "name.…".
template <typename S, typename T>
constexpr NestedSpec<S, T> Nested(absl::string_view name, T S::*member, absl::string_view help) {
  return {name, member, help};
}

// A nested struct whose options are named as if they were the outer struct's.
template <typename S, typename T>
constexpr NestedSpec<S, T> Inline(T S::*member) {
  return {"", member, ""};
}

namespace option_internal {

template <size_t N>
constexpr bool Distinct(const std::array<absl::string_view, N>& names) {
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!names[i].empty() && names[i] == names[j]) return false;
    }
  }
  return true;
}

// Storage without an object: OptionsOf needs its argument for overload resolution only.
template <typename S>
union Unconstructed {
  constexpr Unconstructed() : nothing() {}
  constexpr ~Unconstructed() {}
  char nothing;
  S object;
};
template <typename S>
inline constinit Unconstructed<S> kUnconstructed;

// The option list of S as a constant; Options() has checked it.
template <typename S>
inline constexpr auto kList = OptionsOf(kUnconstructed<S>.object);

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};
template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T>
constexpr OptionKind KindOf() {
  if constexpr (IsOptional<T>::value) {
    return KindOf<typename T::value_type>();
  } else if constexpr (IsVector<T>::value) {
    return OptionKind::kList;
  } else if constexpr (std::is_same_v<T, bool>) {
    return OptionKind::kBool;
  } else {
    constexpr bool kIsNumber = std::is_arithmetic_v<T> || std::is_same_v<T, absl::Duration>;
    return kIsNumber ? OptionKind::kNumber : OptionKind::kText;
  }
}

template <typename T>
std::string Problem(const OptionBounds& bounds, const T& value) {
  if constexpr (IsVector<T>::value) {
    for (const auto& element : value) {
      std::string problem = Problem(bounds, element);
      if (!problem.empty()) return problem;
    }
    return "";
  } else if constexpr (IsOptional<T>::value) {
    return value ? Problem(bounds, *value) : "";
  } else if constexpr (std::is_same_v<T, absl::Duration>) {
    return bounds.Problem(absl::ToDoubleSeconds(value));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return bounds.Problem(absl::string_view(value));
  } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    return bounds.Problem(static_cast<double>(value));
  } else {
    return "";  // bools and named enums have no other values
  }
}

template <typename S, typename T>
OptionRef Reference(const OptionSpec<S, T>& spec, const std::string& prefix, S& object) {
  OptionRef option;
  option.path = absl::StrCat(prefix, spec.name);
  option.help = std::string(spec.help);
  option.bounds = spec.bounds.Describe();
  if (!spec.alias.empty()) option.aliases.emplace_back(spec.alias);
  option.kind = KindOf<T>();
  option.incidental = spec.incidental;
  option.across_ranks = spec.across_ranks;
  option.any_bytes = spec.any_bytes;
  T* value = &(object.*spec.member);
  option.set = [value](absl::string_view text) { return ParseOption(text, *value); };
  option.get = [value] { return FormatOption(*value); };
  option.check = [value, bounds = spec.bounds]() -> absl::Status {
    const std::string problem = Problem(bounds, *value);
    if (problem.empty()) return absl::OkStatus();
    const bool is_name = bounds.num_names > 0 || bounds.names_from != nullptr;
    return is_name ? absl::NotFoundError(problem) : absl::InvalidArgumentError(problem);
  };
  return option;
}

template <typename S>
void Append(S& object, const std::string& prefix, OptionList& list);

template <typename S, typename T>
void AppendItem(const OptionSpec<S, T>& spec, const std::string& prefix, S& object,
                OptionList& list) {
  list.Add(Reference(spec, prefix, object));
}

// A member that appends its options itself, because they are known at run time only.
template <typename T>
concept ListsItself = requires(T& value, const std::string& prefix, OptionList& list) {
  value.AppendOptions(prefix, list);
};

template <typename S, typename T>
void AppendItem(const NestedSpec<S, T>& spec, const std::string& prefix, S& object,
                OptionList& list) {
  const size_t begin = list.options().size();
  std::string inner = prefix;
  if (!spec.name.empty()) {
    absl::StrAppend(&inner, spec.name);
    list.AddGroup({inner, std::string(spec.help)});
    inner += ".";
  }
  if constexpr (ListsItself<T>) {
    (object.*spec.member).AppendOptions(inner, list);
  } else {
    Append(object.*spec.member, inner, list);
  }
  if (spec.may_differ) list.LetDiffer(begin);
}

template <typename S>
void Append(S& object, const std::string& prefix, OptionList& list) {
  std::apply([&](const auto&... item) { (AppendItem(item, prefix, object, list), ...); }, kList<S>);
}

}  // namespace option_internal

// The option list of a struct, for OptionsOf.
template <typename... Items>
constexpr std::tuple<Items...> Options(Items... items) {
  const std::array<absl::string_view, sizeof...(items)> names = {items.name...};
  // Fails constant evaluation, so the compiler shows this line.
  if (!option_internal::Distinct(names)) throw "two options of one struct have one name";
  return {items...};
}

// All options of `options`, including nested ones. The list points into `options`, which must
// outlive it.
template <typename S>
OptionList ListOptions(S& options) {
  OptionList list;
  option_internal::Append(options, "", list);
  return list;
}

// OptionError for the first value out of range; its path is relative to this struct.
template <typename S>
absl::Status ValidateOptions(const S& options) {
  S copy = options;
  return ListOptions(copy).Validate();
}

}  // namespace ddp
