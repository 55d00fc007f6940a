#include "base/option_flags.h"

#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp {
namespace {

// "--lr=0.1" as its two halves.
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
  argument.name = std::string(rest.substr(0, equals));
  argument.written = std::string(text.substr(0, text.find('=')));
  if (equals != absl::string_view::npos) argument.value = std::string(rest.substr(equals + 1));
  return argument;
}

}  // namespace

absl::StatusOr<OptionFlags> OptionFlags::Parse(int argc, const char* const* argv,
                                               const OptionList& list) {
  OptionFlags flags;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view text = argv[i];
    if (text == "--") {
      flags.positional.insert(flags.positional.end(), argv + i + 1, argv + argc);
      break;
    }
    std::optional<Argument> argument = AsFlag(text);
    if (!argument) {
      flags.positional.emplace_back(text);
      continue;
    }
    if (argument->name == "help" || argument->name == "h") {
      flags.help = true;
      continue;
    }
    absl::StatusOr<const OptionRef*> option = list.Find(argument->name);
    if (!option.ok() && absl::StartsWith(argument->name, "no")) {
      const absl::StatusOr<const OptionRef*> negated = list.Find(argument->name.substr(2));
      if (negated.ok() && (*negated)->is_bool) {
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
    if (!argument->value && found.is_bool) argument->value = "true";
    if (!argument->value) {
      if (i + 1 == argc) {
        return absl::InvalidArgumentError(
            absl::StrCat(argument->written, " needs a value: ", argument->written, "=…"));
      }
      argument->value = argv[++i];
    }
    flags.written_[found.path] = argument->written;
    if (absl::Status set = found.set(*argument->value); !set.ok()) {
      return absl::Status(
          set.code(), absl::StrCat(argument->written, "=", *argument->value, " ", set.message()));
    }
  }
  return flags;
}

std::string OptionFlags::Explain(const absl::Status& status, const OptionList& list) const {
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem) return std::string(status.message());
  // Libraries report a suffix of the path.
  const absl::StatusOr<const OptionRef*> option = list.Find(problem->path);
  if (!option.ok()) return std::string(status.message());
  const std::string& path = (*option)->path;
  const auto it = written_.find(path);
  const std::string name =
      it != written_.end() ? it->second : absl::StrCat("--", list.ShortNames().at(path));
  return absl::StrCat(name, "=", problem->value, " ", problem->problem);
}

}  // namespace ddp
