// Looks at checkpoints, compares and converts them: docs/ckpt.md.
#include <cstdio>
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
#include "base/options.h"
#include "base/status.h"
#include "tools/ckpt_commands.h"

namespace ddp::tools {
namespace {

constexpr int kError = 2;  // 1: what was asked for is different or damaged

struct CkptOptions {
  bool json = false;
  ckpt::ConvertOptions convert;
};

constexpr auto OptionsOf(const CkptOptions&) {
  return Options(Option("json", &CkptOptions::json, "print JSON"), Inline(&CkptOptions::convert));
}

constexpr char kUsage[] =
    R"(ckpt looks at checkpoints, compares and converts them.

  ckpt ls DIR                  the checkpoints of a folder
  ckpt ls FILE                 the tensors of a checkpoint
  ckpt verify DIR|FILE         reads all; exits with 1 if one is damaged
  ckpt diff A B                the first difference; exits with 1 if there is one
  ckpt convert FROM TO         writes FROM in another format, or a part of it

)";

struct Command {
  const char* name;
  size_t paths;
};
constexpr Command kCommands[] = {{"ls", 1}, {"verify", 1}, {"diff", 2}, {"convert", 2}};

absl::StatusOr<ckpt::Report> Run(const std::vector<std::string>& words, CkptOptions& options) {
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    names.emplace_back(command.name);
    if (words[0] != command.name) continue;
    if (words.size() != command.paths + 1) {
      return absl::InvalidArgumentError(absl::StrCat(words[0], " takes ", command.paths,
                                                     command.paths == 1 ? " path" : " paths",
                                                     ", not ", words.size() - 1));
    }
  }
  if (words[0] == "ls") return ckpt::List(words[1]);
  if (words[0] == "verify") return ckpt::Verify(words[1]);
  if (words[0] == "diff") return ckpt::Diff(words[1], words[2]);
  if (words[0] == "convert") {
    options.convert.from = words[1];
    options.convert.to = words[2];
    return ckpt::Convert(options.convert);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", words[0], "' is no command; commands: ", absl::StrJoin(names, ", "),
                   DidYouMean(words[0], names)));
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
  const absl::StatusOr<ckpt::Report> report =
      CatchStatus("ckpt", [&] { return Run(flags->positional, options); });
  if (!report.ok()) return fail(flags->Explain(report.status(), list));
  const std::string text = options.json ? absl::StrCat(report->json.dump(2), "\n") : report->text;
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    return fail("cannot write the output");
  }
  return report->exit_code;
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
