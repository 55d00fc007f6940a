#include "base/option_flags.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/status.h"
#include "base/utf8.h"

namespace ddp {
namespace {

// The two halves of "--lr=0.1".
struct Argument {
  std::string written;  // "--lr"
  std::string name;     // "lr"
  std::optional<std::string> value;
};

std::optional<Argument> AsFlag(absl::string_view text) {
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "-")) return std::nullopt;
  absl::ConsumePrefix(&rest, "-");
  if (rest.empty() || !absl::ascii_isalpha(static_cast<unsigned char>(rest[0]))) {
    return std::nullopt;
  }
  Argument argument;
  const size_t equals = rest.find('=');
  argument.name = absl::StrReplaceAll(rest.substr(0, equals), {{"-", "_"}});
  argument.written = std::string(text.substr(0, text.find('=')));
  if (equals != absl::string_view::npos) argument.value = std::string(rest.substr(equals + 1));
  return argument;
}

// Splits "optimizer.lr=0.1", an argument without dashes.
std::optional<Argument> AsOverride(absl::string_view text) {
  const size_t equals = text.find('=');
  if (equals == absl::string_view::npos || equals == 0) return std::nullopt;
  const absl::string_view name = text.substr(0, equals);
  const auto is_of_name = [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '_' || c == '.';
  };
  if (!std::all_of(name.begin(), name.end(), is_of_name)) return std::nullopt;
  return Argument{std::string(name), std::string(name), std::string(text.substr(equals + 1))};
}

// Finds the option foo for "--nofoo", which means "--foo=false". Null if there is no such bool.
const OptionRef* Negated(const Argument& argument, const OptionList& list) {
  absl::string_view name = argument.name;
  if (!absl::ConsumePrefix(&name, "no")) return nullptr;
  const absl::StatusOr<const OptionRef*> option = list.Find(name);
  return option.ok() && (*option)->kind == OptionKind::kBool ? *option : nullptr;
}

// Whether an argument behind a flag without a value is more likely the next flag than that value. A
// negative number and a word of one dash are values.
bool LooksLikeFlag(absl::string_view text, const OptionList& list) {
  const std::optional<Argument> argument = AsFlag(text);
  if (!argument) return false;
  return absl::StartsWith(text, "--") || list.Find(argument->name).ok();
}

}  // namespace

absl::StatusOr<CommandLine> CommandLine::Read(int argc, const char* const* argv,
                                              const OptionList& list) {
  DDP_RETURN_IF_ERROR(list.CheckNames());
  CommandLine line;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view text = argv[i];
    if (text == "--") {
      line.positional.insert(line.positional.end(), argv + i + 1, argv + argc);
      break;
    }
    std::optional<Argument> argument = AsFlag(text);
    const bool is_flag = argument.has_value();
    if (!is_flag) argument = AsOverride(text);
    if (!argument) {
      line.positional.emplace_back(text);
      continue;
    }
    if (is_flag && (argument->name == "help" || argument->name == "h")) {
      line.help = true;
      continue;
    }
    absl::StatusOr<const OptionRef*> option = list.Find(argument->name);
    // The folder of a sweep's job: "lr=0.1-1f3a9c2e".
    std::error_code ignored;
    if (!option.ok() && !is_flag && std::filesystem::exists(std::string(text), ignored)) {
      line.positional.emplace_back(text);
      continue;
    }
    if (!option.ok() && is_flag) {
      if (const OptionRef* negated = Negated(*argument, list); negated != nullptr) {
        if (argument->value) {
          return absl::InvalidArgumentError(
              absl::StrCat(text, ": ", argument->written, " takes no value"));
        }
        option = negated;
        argument->value = "false";
      }
    }
    if (!option.ok()) {
      return absl::Status(option.status().code(),
                          absl::StrCat(argument->written, ": ", option.status().message()));
    }
    const OptionRef& found = **option;
    if (!argument->value && found.kind == OptionKind::kBool) argument->value = "true";
    if (!argument->value) {
      const std::string needs =
          absl::StrCat(argument->written, " needs a value: ", argument->written, "=…");
      if (i + 1 == argc) return absl::InvalidArgumentError(needs);
      if (LooksLikeFlag(argv[i + 1], list)) {
        return absl::InvalidArgumentError(absl::StrCat(
            needs, "; if it is the next argument: ", argument->written, "=", argv[i + 1]));
      }
      argument->value = argv[++i];
    }
    line.assignments.push_back({found.path, *std::move(argument->value), argument->written});
  }
  return line;
}

absl::Status OptionSetter::Set(const OptionAssignment& assignment, const OptionList& list) {
  DDP_ASSIGN_OR_RETURN(const OptionRef* option, list.Find(assignment.path));
  written_[option->path] = assignment.written;
  absl::Status set = CheckText(assignment.value, option->any_bytes);
  if (set.ok()) set = option->set(assignment.value);
  if (set.ok()) return set;
  return absl::Status(set.code(), absl::StrCat(assignment.written, "=", Printable(assignment.value),
                                               " ", set.message()));
}

std::string OptionSetter::Explain(const absl::Status& status, const OptionList& list) const {
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem) return Printable(status.message());
  // Libraries report a suffix of the path.
  const absl::StatusOr<const OptionRef*> option = list.Find(problem->path);
  if (!option.ok()) return Printable(status.message());
  const std::string& path = (*option)->path;
  const std::string name = Written(path).value_or(absl::StrCat("--", list.ShortNames().at(path)));
  // Keep what was put before the error: "rank 1: lr=-1 …".
  absl::string_view context = status.message();
  const std::string as_made =
      absl::StrCat(problem->path, "=", problem->value, " ", problem->problem);
  if (!absl::ConsumeSuffix(&context, as_made)) context = "";
  const std::optional<Argument> flag = AsFlag(name);
  if (flag && !list.Find(flag->name).ok() && Negated(*flag, list) == *option) {
    return Printable(absl::StrCat(context, name, " ", problem->problem));  // it takes no value
  }
  return Printable(absl::StrCat(context, name, "=", problem->value, " ", problem->problem));
}

std::optional<std::string> OptionSetter::Written(const std::string& path) const {
  const auto it = written_.find(path);
  if (it == written_.end()) return std::nullopt;
  return it->second;
}

absl::StatusOr<OptionFlags> OptionFlags::Parse(int argc, const char* const* argv,
                                               const OptionList& list) {
  DDP_ASSIGN_OR_RETURN(CommandLine line, CommandLine::Read(argc, argv, list));
  OptionFlags flags;
  flags.help = line.help;
  flags.positional = std::move(line.positional);
  for (const OptionAssignment& assignment : line.assignments) {
    DDP_RETURN_IF_ERROR(flags.setter_.Set(assignment, list));
  }
  return flags;
}

}  // namespace ddp
