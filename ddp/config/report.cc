#include "ddp/config/report.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json_number.h"
#include "nlohmann/json.hpp"

namespace ddp::config {
namespace {

constexpr size_t kBuild = 8;  // digits of a build that are shown
constexpr char kTrainingLoss[] = "train/loss";
constexpr char kNone[] = "-";

// The value that the table is sorted by; none if it is NaN.
std::optional<double> Score(const JobResult& result, const SweepMetric& metric) {
  const auto it = result.metrics.find(metric.name);
  if (result.state != JobState::kFinished || it == result.metrics.end() || std::isnan(it->second)) {
    return std::nullopt;
  }
  return metric.largest_first ? it->second : -it->second;
}

// The last value that a job has of a metric, as a cell.
std::string LastValue(const JobResult& result, const std::string& metric) {
  const auto it = result.metrics.find(metric);
  return it == result.metrics.end() ? kNone : absl::StrFormat("%.6g", it->second);
}

// How many columns a terminal takes for it: continuation bytes of UTF-8 take none.
size_t Columns(absl::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](unsigned char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

std::string AlignedTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Columns(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i], std::string(widths[i] + 2 - Columns(row[i]), ' '));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

absl::StatusOr<SweepMetric> ParseSweepMetric(absl::string_view text) {
  SweepMetric metric;
  const size_t colon = text.rfind(':');
  metric.name = std::string(text.substr(0, colon));
  if (colon == absl::string_view::npos) return metric;
  const absl::string_view order = text.substr(colon + 1);
  if (metric.name.empty() || (order != "max" && order != "min")) {
    return absl::InvalidArgumentError("is no metric: give NAME:max or NAME:min");
  }
  metric.largest_first = order == "max";
  return metric;
}

absl::Status WriteSweepFile(const std::string& path, const std::vector<Job>& jobs,
                            const std::vector<JobResult>& results) {
  std::string text;
  for (size_t i = 0; i < jobs.size(); ++i) {
    nlohmann::ordered_json line = {{"id", jobs[i].id},
                                   {"overrides", nlohmann::ordered_json::object()},
                                   {"status", StateName(results[i].state)},
                                   {"reason", results[i].reason},
                                   {"build", results[i].build},
                                   {"metrics", nlohmann::ordered_json::object()},
                                   {"folder", jobs[i].folder}};
    for (const auto& [name, value] : jobs[i].overrides) line["overrides"][name] = value;
    for (const auto& [name, value] : results[i].metrics) line["metrics"][name] = ToJson(value);
    // Logs may have bytes that are not UTF-8.
    absl::StrAppend(
        &text, line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n");
  }
  return WriteFileAtomically(path, text);
}

std::string SweepTable(const std::vector<Job>& jobs, const std::vector<JobResult>& results,
                       const SweepMetric& metric) {
  std::vector<size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  const auto place = [&](size_t i) {
    return results[i].state == JobState::kFinished ? (Score(results[i], metric) ? 0 : 1) : 2;
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (place(a) != place(b)) return place(a) < place(b);
    return place(a) == 0 && *Score(results[a], metric) > *Score(results[b], metric);
  });

  std::set<std::string> builds;
  bool any_progress = false, any_loss = false, any_again = false;
  for (const JobResult& result : results) {
    if (result.state != JobState::kMissing) builds.insert(result.build);
    any_progress = any_progress || !result.progress.epoch.empty();
    // The metric is often one of an evaluation, of which there is none yet.
    any_loss = any_loss || (result.state == JobState::kRunning && metric.name != kTrainingLoss &&
                            result.metrics.count(kTrainingLoss) > 0);
    any_again = any_again || result.attempts > 1;
  }
  std::vector<std::string> header = {"status"};
  if (!metric.name.empty()) header.insert(header.begin(), metric.name);
  if (any_progress) header.insert(header.end(), {"epoch", "eta"});
  if (any_loss) header.push_back(kTrainingLoss);
  for (const auto& [name, value] : jobs[0].overrides) header.push_back(name);
  if (any_again) header.push_back("attempt");
  if (builds.size() > 1) header.push_back("build");
  header.push_back("");
  std::vector<std::vector<std::string>> rows = {header};
  for (const size_t i : order) {
    const JobResult& result = results[i];
    const bool runs = result.state == JobState::kRunning;
    std::vector<std::string> row = {StateName(result.state)};
    if (!metric.name.empty()) {
      const bool counts = runs || result.state == JobState::kFinished;
      row.insert(row.begin(), counts ? LastValue(result, metric.name) : kNone);
    }
    if (any_progress) {
      for (const std::string& text : {result.progress.epoch, result.progress.eta}) {
        row.push_back(text.empty() ? kNone : text);
      }
    }
    if (any_loss) row.push_back(runs ? LastValue(result, kTrainingLoss) : kNone);
    for (const auto& [name, value] : jobs[i].overrides) row.push_back(value);
    if (any_again) row.push_back(result.attempts > 0 ? absl::StrCat(result.attempts) : kNone);
    if (builds.size() > 1)
      row.push_back(result.build.empty() ? kNone : result.build.substr(0, kBuild));
    row.push_back(result.reason);
    rows.push_back(std::move(row));
  }
  return AlignedTable(rows);
}

}  // namespace ddp::config
