// Compares runs by what they have logged: a table in the shell, and curves as a page.
//
//   bazel run //tools:plot -- runs/a runs/b                     # folders of --log_dir
//   bazel run //tools:plot -- runs/sweep --tags=test/ --html=curves.html

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/config/report.h"
#include "nlohmann/json.hpp"
#include "tools/plot_page.h"
#include "tools/plot_report.h"
#include "tools/plot_runs.h"

namespace ddp::tools {
namespace {

constexpr int kFailed = 1;
constexpr int kUsageError = 2;

struct ProgramOptions {
  std::string tags = "";
  std::vector<std::string> best = {};
  bool json = false;
  std::string html = "";
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(
      Option("tags", &ProgramOptions::tags,
             "only tags in which this regular expression is found; empty: all"),
      Option("best", &ProgramOptions::best,
             "which value of a tag is its best, as TAG:max or TAG:min; known are accuracies, "
             "losses and other usual names"),
      Option("json", &ProgramOptions::json, "print JSON instead of the table"),
      Option("html", &ProgramOptions::html,
             "also write all curves to this file, one page that needs nothing else"));
}

// Returns the exit code: as with ls, 1 if something could not be read, though the rest is shown.
absl::StatusOr<int> Plot(const std::vector<std::string>& folders, const ProgramOptions& options) {
  BestOrders orders;
  for (const std::string& best : options.best) {
    const absl::StatusOr<config::SweepMetric> metric = config::ParseSweepMetric(best);
    if (!metric.ok() || metric->name.empty()) {
      return OptionError("best", best, "is no tag: give TAG:max or TAG:min");
    }
    orders[metric->name] = metric->largest_first;
  }
  DDP_ASSIGN_OR_RETURN(const FoundRuns found, ReadRuns(folders));
  for (const std::string& warning : found.warnings) {
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  }
  for (const std::string& error : found.errors) {
    std::fprintf(stderr, "error: %s\n", error.c_str());
  }
  if (found.runs.empty()) return kFailed;
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, SelectTags(found.runs, ""));
  const std::string there = absl::StrCat("there are: ", absl::StrJoin(all, ", "));
  for (const auto& [tag, largest] : orders) {
    if (std::find(all.begin(), all.end(), tag) != all.end()) continue;
    return OptionError("best", absl::StrJoin(options.best, ","),
                       absl::StrCat("has '", tag, "', which is no tag of the runs; ", there));
  }
  const absl::StatusOr<std::vector<std::string>> tags = SelectTags(found.runs, options.tags);
  if (!tags.ok()) return OptionError("tags", options.tags, tags.status().message());
  if (tags->empty()) {
    return OptionError("tags", options.tags, absl::StrCat("is found in no tag; ", there));
  }
  if (!options.html.empty()) {
    const absl::Status written = WriteFileAtomically(options.html, PlotPage(found.runs, *tags));
    if (!written.ok()) {
      return OptionError("html", options.html,
                         absl::StrCat("cannot be written: ", written.message()), written.code());
    }
  }
  const std::string text =
      options.json
          ? PlotJson(found.runs, *tags, orders)
                    .dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                "\n"
          : PlotTable(found.runs, *tags, orders);
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    return absl::UnknownError("cannot write to standard output");
  }
  return found.errors.empty() ? 0 : kFailed;
}

int Main(int argc, char** argv) {
  ProgramOptions options;
  const OptionList list = ListOptions(options);
  const auto fail = [](int code, absl::string_view message) {
    std::fprintf(stderr, "error: %s\n", std::string(message).c_str());
    return code;
  };
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  if (!flags.ok()) return fail(kUsageError, flags.status().message());
  if (flags->help) {
    std::printf(
        "Compares runs by what they have logged.\nUsage: plot RUN…, folders of --log_dir or of a "
        "sweep\nExample: bazel run //tools:plot -- runs/a runs/b --html=curves.html\n\n%s",
        list.Describe("--").c_str());
    return 0;
  }
  if (flags->positional.empty()) {
    return fail(kUsageError, "give one or more folders of runs: plot runs/a runs/b");
  }
  const absl::StatusOr<int> code =
      CatchStatus("", [&] { return Plot(flags->positional, options); });
  if (code.ok()) return *code;
  return fail(absl::IsInvalidArgument(code.status()) ? kUsageError : kFailed,
              flags->Explain(code.status(), list));
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
