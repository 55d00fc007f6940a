// Looks at checkpoints, compares, converts and averages them: docs/ckpt.md.
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_flags.h"
#include "base/option_list.h"
#include "base/options.h"
#include "base/status.h"
#include "nlohmann/json.hpp"
#include "tools/ckpt_commands.h"

namespace ddp::tools {
namespace {

constexpr int kError = 2;  // 1: what was asked for is different or damaged

struct CkptOptions {
  bool json = false;
  ckpt::VerifyOptions verify;
  ckpt::ConvertOptions convert;
};

constexpr auto OptionsOf(const CkptOptions&) {
  return Options(Option("json", &CkptOptions::json, "print JSON"), Inline(&CkptOptions::verify),
                 Inline(&CkptOptions::convert));
}

constexpr char kUsage[] =
    R"(ckpt looks at checkpoints, compares, converts and averages them.

  ckpt ls DIR                    the checkpoints of a folder
  ckpt ls FILE                   the tensors of a checkpoint
  ckpt verify DIR|FILE           reads all; exits with 1 if one is damaged
  ckpt diff A B                  the first difference; exits with 1 if there is one
  ckpt convert FROM TO           writes FROM in another format, or a part of it
  ckpt average A B ... --to=OUT  writes the mean of several models
  ckpt pin DIR NAME              no rule deletes this checkpoint
  ckpt unpin DIR NAME            the reverse

)";

struct Command {
  const char* name;
  const char* arguments;             // the words after it, as in the usage
  size_t least, most;                // how many they are
  std::vector<std::string> options;  // besides json
};

const std::vector<Command>& Commands() {
  static const auto* const commands = new std::vector<Command>{
      {"ls", "DIR or FILE", 1, 1, {}},
      {"verify", "DIR or FILE", 1, 1, {"quarantine"}},
      {"diff", "A B", 2, 2, {}},
      {"convert", "FROM TO", 2, 2, {"to", "only", "dtype"}},
      {"average", "A B ...", 2, 1000, {"to"}},
      {"pin", "DIR NAME", 2, 2, {}},
      {"unpin", "DIR NAME", 2, 2, {}},
  };
  return *commands;
}

// The command of these words, with no option that it does not take.
absl::StatusOr<std::string> CommandOf(const CommandLine& line) {
  const std::string& word = line.positional[0];
  std::vector<std::string> names;
  for (const Command& command : Commands()) {
    names.emplace_back(command.name);
    if (word != command.name) continue;
    const size_t count = line.positional.size() - 1;
    if (count < command.least || count > command.most) {
      return absl::InvalidArgumentError(absl::StrCat(word, " takes ", command.arguments,
                                                     ", and not ", count,
                                                     count == 1 ? " argument" : " arguments"));
    }
    std::set<std::string> given;
    for (const OptionAssignment& option : line.assignments) {
      if (!given.insert(option.path).second) {
        return absl::InvalidArgumentError(
            absl::StrCat(word, " takes --", option.path, " once, and it is given twice"));
      }
      const auto& taken = command.options;
      if (option.path == "json" || std::count(taken.begin(), taken.end(), option.path) > 0) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat(word, " takes no ", option.written));
    }
    return word;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", word, "' is no command; commands: ", absl::StrJoin(names, ", "),
                   DidYouMean(word, names)));
}

absl::StatusOr<ckpt::CommandOutput> Run(const CommandLine& line, CkptOptions& options) {
  DDP_ASSIGN_OR_RETURN(const std::string command, CommandOf(line));
  const std::vector<std::string> words(line.positional.begin() + 1, line.positional.end());
  if (command == "ls") return ckpt::List(words[0]);
  if (command == "verify") return ckpt::Verify(words[0], options.verify);
  if (command == "diff") return ckpt::Diff(words[0], words[1]);
  if (command == "average") {
    if (options.convert.format.empty()) {
      return absl::InvalidArgumentError("average needs --to=OUT, the checkpoint to write");
    }
    return ckpt::Average(words, options.convert.format);
  }
  if (command == "convert") {
    options.convert.from = words[0];
    options.convert.to = words[1];
    return ckpt::Convert(options.convert);
  }
  return ckpt::SetPinned(words[0], words[1], command == "pin");
}

int Main(int argc, char** argv) {
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kWarning);
  absl::InitializeLog();
  CkptOptions options;
  const OptionList list = ListOptions(options);
  const auto fail = [](absl::string_view message) {
    std::fprintf(stderr, "error: %s\n", std::string(message).c_str());
    return kError;
  };
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  if (!flags.ok()) return fail(flags.status().message());
  if (flags->help || flags->positional.empty()) {
    std::fprintf(flags->help ? stdout : stderr, "%s%s", kUsage, list.Describe("--").c_str());
    return flags->help ? 0 : kError;
  }
  absl::Status status = list.Validate();
  if (!status.ok()) return fail(flags->Explain(status, list));
  const absl::StatusOr<CommandLine> line = CommandLine::Read(argc, argv, list);
  if (!line.ok()) return fail(line.status().message());
  const absl::StatusOr<ckpt::CommandOutput> output =
      CatchStatus("ckpt", [&] { return Run(*line, options); });
  if (!output.ok()) return fail(flags->Explain(output.status(), list));
  // Names of tensors and metrics may be any bytes.
  using Replace = nlohmann::ordered_json::error_handler_t;
  const std::string text =
      options.json ? absl::StrCat(output->json.dump(2, ' ', false, Replace::replace), "\n")
                   : output->text;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return fail("cannot write the output");
  }
  return output->exit_code;
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
