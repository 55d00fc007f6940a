#include "ddp/config/progress.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "launchers/launcher.h"
#include "nlohmann/json.hpp"

namespace ddp::config {
namespace {

struct Counts {
  int64_t epoch = 0;  // from 1
  int64_t epochs = 0;
  int64_t step = 0;  // of this epoch
  int64_t steps = 0;
};

// "N/M"
bool ParsePair(absl::string_view text, int64_t& first, int64_t& second) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  return parts.size() == 2 && absl::SimpleAtoi(parts[0], &first) &&
         absl::SimpleAtoi(parts[1], &second) && first >= 0 && second > 0;
}

// Of a line "epoch 2/10 step 422/938 loss …", with anything before it.
std::optional<Counts> ParseLine(absl::string_view line) {
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  for (size_t i = 0; i + 3 < words.size(); ++i) {
    Counts counts;
    if (words[i] == "epoch" && words[i + 2] == "step" &&
        ParsePair(words[i + 1], counts.epoch, counts.epochs) &&
        ParsePair(words[i + 3], counts.step, counts.steps)) {
      return counts;
    }
  }
  return std::nullopt;
}

// Seconds per step, of the steps since the last start of the job; nullopt if there are too few.
std::optional<double> SecondsPerStep(absl::string_view metrics) {
  struct Point {
    double step = 0, time = 0;
  };
  int count = 0;
  Point first, last;
  for (absl::string_view line : absl::StrSplit(metrics, '\n')) {
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object() || !record.contains("step") || !record.contains("time") ||
        !record["step"].is_number() || !record["time"].is_number()) {
      continue;
    }
    const Point point = {record["step"].get<double>(), record["time"].get<double>()};
    if (record.contains("event")) {
      count = 0;  // an end: what follows is of another start
      continue;
    }
    if (count++ == 0) first = point;
    last = point;
  }
  if (count == 0 || last.step <= first.step || last.time <= first.time) return std::nullopt;
  return (last.time - first.time) / (last.step - first.step);
}

std::string ShortTime(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return absl::StrCat(whole, "s");
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 48 * 3600) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

}  // namespace

JobProgress ProgressIn(absl::string_view log, absl::string_view metrics) {
  std::optional<Counts> counts;
  for (absl::string_view line : absl::StrSplit(log, absl::ByAnyChar("\n\r"))) {
    if (const std::optional<Counts> found = ParseLine(line)) counts = found;
  }
  if (!counts) return {};
  JobProgress progress = {.epoch = absl::StrCat(counts->epoch, "/", counts->epochs), .eta = ""};
  if (const std::optional<double> step = SecondsPerStep(metrics)) {
    const auto left = static_cast<double>((counts->epochs - counts->epoch) * counts->steps +
                                          counts->steps - counts->step);
    progress.eta = ShortTime(left * *step);
  }
  return progress;
}

JobProgress ReadProgress(const std::string& folder) {
  const auto log = ReadFile(absl::StrCat(folder, "/", launchers::BatchJob::kLog));
  const auto metrics = ReadFile(absl::StrCat(folder, "/metrics.jsonl"));
  return ProgressIn(log.ok() ? *log : "", metrics.ok() ? *metrics : "");
}

}  // namespace ddp::config
