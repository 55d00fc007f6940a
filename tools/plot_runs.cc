#include "tools/plot_runs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/json_number.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "ddp/config/effective.h"
#include "nlohmann/json.hpp"

namespace ddp::tools {
namespace {

constexpr char kMetrics[] = "metrics.jsonl";
constexpr char kSweep[] = "sweep.jsonl";
constexpr char kHyperParameters[] = "hyper_parameters";

absl::StatusOr<bool> Has(const std::string& folder, absl::string_view name) {
  const std::string path = absl::StrCat(folder, "/", name);
  std::error_code error;
  const bool exists = std::filesystem::exists(path, error);
  // Only a file that is missing is no error here. Others, as of permissions, may hide a run.
  if (error) return FileError(error.value(), "looking for", path);
  return exists;
}

void Add(int64_t step, double value, Curve& curve) {
  std::vector<CurvePoint>& points = curve.points;
  while (!points.empty() && points.back().step >= step) points.pop_back();
  points.push_back({step, value});
}

// The rows of a table that logging::HparamsTable has made.
std::map<std::string, std::string> OptionsOfTable(absl::string_view markdown) {
  constexpr char kEscapedBar = '\1';
  const std::string text = absl::StrReplaceAll(markdown, {{"\\|", std::string(1, kEscapedBar)}});
  const auto cell = [](absl::string_view raw) {
    return absl::StrReplaceAll(absl::StripAsciiWhitespace(raw),
                               {{std::string(1, kEscapedBar), "|"}});
  };
  std::map<std::string, std::string> options;
  const std::vector<std::string> rows = absl::StrSplit(text, '\n');
  for (size_t i = 2; i < rows.size(); ++i) {
    const std::vector<std::string> cells = absl::StrSplit(rows[i], '|');
    if (cells.size() == 4) options[cell(cells[1])] = cell(cells[2]);
  }
  return options;
}

// Takes one line of metrics.jsonl. False if it is no record.
bool AddLine(absl::string_view line, LoggedRun& run) {
  const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) return false;
  const auto step = record.find("step");
  if (step == record.end() || !step->is_number_integer()) return false;
  for (const auto& [tag, value] : record.items()) {
    if (tag == "step" || tag == "time") continue;
    if (const std::optional<double> number = NumberFromJson(value)) {
      Add(step->get<int64_t>(), *number, run.curves[tag]);
    } else if (tag == kHyperParameters && value.is_string()) {
      run.options = OptionsOfTable(value.get<std::string>());
    }
  }
  return true;
}

absl::Status ReadCurves(LoggedRun& run, std::vector<std::string>& warnings) {
  const std::string path = absl::StrCat(run.folder, "/", kMetrics);
  DDP_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  int64_t bad_lines = 0;
  size_t first_bad = 0;
  // What follows the last newline is nothing, or a line that is being written.
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    if (absl::StripAsciiWhitespace(lines[i]).empty() || AddLine(lines[i], run)) continue;
    if (bad_lines++ == 0) first_bad = i + 1;
  }
  AddLine(lines.back(), run);
  if (bad_lines > 0) {
    warnings.push_back(absl::StrCat(path, ":", first_bad, ": not a record with a step; left out ",
                                    bad_lines, bad_lines == 1 ? " line" : " lines"));
  }
  return absl::OkStatus();
}

// The name of the file with the configuration of the run's last start; empty: none.
std::string ConfigurationFile(const std::string& folder) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) return "";
  std::string file;
  int64_t newest = -1;
  for (const std::string& name : *names) {
    absl::string_view middle = name;
    int64_t step = 0;
    const bool is_first = name == "config.yaml";
    const bool is_later = absl::ConsumePrefix(&middle, "config_step_") &&
                          absl::ConsumeSuffix(&middle, ".yaml") && absl::SimpleAtoi(middle, &step);
    if ((is_first || is_later) && step > newest) {
      newest = step;
      file = name;
    }
  }
  return file;
}

void ReadOptions(LoggedRun& run, std::vector<std::string>& warnings) {
  const std::string file = ConfigurationFile(run.folder);
  if (!file.empty()) {
    const std::string path = absl::StrCat(run.folder, "/", file);
    const absl::StatusOr<std::string> text = ReadFile(path);
    auto options = text.ok() ? config::ValuesIn(*text) : std::nullopt;
    if (options) {
      run.options = *std::move(options);
    } else {
      warnings.push_back(absl::StrCat(
          text.ok() ? absl::StrCat(path, ": not YAML") : std::string(text.status().message()),
          "; its options are left out"));
    }
  }
  // Each run has others, which the name of its folder says already.
  for (const char* path : {"log.dir", "checkpoint.dir"}) run.options.erase(path);
}

// `given` itself or the folders in it, those with metrics. Folders in it that cannot be read are
// errors in `found`; that no run in it has begun is a warning.
absl::StatusOr<std::vector<std::string>> RunFolders(const std::string& given, FoundRuns& found) {
  DDP_ASSIGN_OR_RETURN(const bool is_run, Has(given, kMetrics));
  if (is_run) return std::vector<std::string>{given};
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(given);
  if (!names.ok()) {
    return absl::Status(names.status().code(),
                        absl::StrCat(names.status().message(),
                                     "; give the folder of a run (--log_dir) or of a ", "sweep"));
  }
  std::vector<std::string> folders;
  bool hidden = false;  // whether there may be a run that cannot be seen
  for (const std::string& name : *names) {
    const std::string folder = absl::StrCat(given, absl::EndsWith(given, "/") ? "" : "/", name);
    const absl::StatusOr<bool> has_metrics = Has(folder, kMetrics);
    if (!has_metrics.ok()) {
      hidden = true;
      found.errors.push_back(std::string(has_metrics.status().message()));
    } else if (*has_metrics) {
      folders.push_back(folder);
    }
  }
  if (folders.empty() && !hidden) {
    // A job that waits has its configuration, and so has a run that has just begun.
    DDP_ASSIGN_OR_RETURN(const bool is_sweep, Has(given, kSweep));
    if (is_sweep || !ConfigurationFile(given).empty()) {
      found.warnings.push_back(absl::StrCat(given, ": no ", kMetrics, " yet; left out"));
      return folders;
    }
    return absl::NotFoundError(absl::StrCat(given, " has no ", kMetrics,
                                            ", nor has a folder in it; give the folder of a run ",
                                            "(--log_dir, with --log_sinks=jsonl) or of a sweep"));
  }
  return folders;
}

// Names without the folders that all have in common.
void NameRuns(std::vector<LoggedRun>& runs) {
  for (LoggedRun& run : runs) run.name = run.folder;
  if (runs.size() == 1) {
    runs[0].name = std::filesystem::path(runs[0].folder).filename().string();
    if (runs[0].name.empty() || runs[0].name == ".") runs[0].name = runs[0].folder;
    return;
  }
  while (true) {
    const size_t slash = runs[0].name.find('/');
    if (slash == std::string::npos) return;
    const std::string prefix = runs[0].name.substr(0, slash + 1);
    for (const LoggedRun& run : runs) {
      if (!absl::StartsWith(run.name, prefix)) return;
    }
    for (LoggedRun& run : runs) run.name = run.name.substr(prefix.size());
  }
}

}  // namespace

std::optional<CurvePoint> Curve::Best(bool largest) const {
  std::optional<CurvePoint> best;
  for (const CurvePoint& point : points) {
    if (!std::isfinite(point.value)) continue;
    if (!best || (largest ? point.value > best->value : point.value < best->value)) best = point;
  }
  return best;
}

int64_t Curve::NotFinite() const {
  return std::count_if(points.begin(), points.end(),
                       [](const CurvePoint& point) { return !std::isfinite(point.value); });
}

absl::StatusOr<FoundRuns> ReadRuns(const std::vector<std::string>& folders) {
  FoundRuns found;
  std::vector<std::string> bad;  // warnings of runs without values
  std::set<std::string> seen;
  for (const std::string& given : folders) {
    const absl::StatusOr<std::vector<std::string>> of_given =
        RunFolders(checkpoint::WithoutSlashes(given), found);
    if (!of_given.ok()) {
      found.errors.push_back(std::string(of_given.status().message()));
      continue;
    }
    for (const std::string& folder : *of_given) {
      if (!seen.insert(folder).second) continue;
      LoggedRun run;
      run.folder = folder;
      const size_t known = found.warnings.size();
      if (const absl::Status read = ReadCurves(run, found.warnings); !read.ok()) {
        found.errors.push_back(std::string(read.message()));
        continue;
      }
      if (run.curves.empty()) {
        bad.insert(bad.end(), found.warnings.begin() + static_cast<std::ptrdiff_t>(known),
                   found.warnings.end());
        found.warnings.push_back(absl::StrCat(folder, "/", kMetrics, ": no values yet; left out"));
        continue;
      }
      ReadOptions(run, found.warnings);
      found.runs.push_back(std::move(run));
    }
  }
  if (found.runs.empty()) {
    if (!found.errors.empty()) return found;
    return absl::NotFoundError(
        absl::StrCat(absl::StrJoin(folders, ", "), ": no values in ", kMetrics,
                     bad.empty() ? " yet" : absl::StrCat(" (", absl::StrJoin(bad, "; "), ")")));
  }
  NameRuns(found.runs);
  return found;
}

}  // namespace ddp::tools
