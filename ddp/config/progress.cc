#include "ddp/config/progress.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "launchers/launcher.h"
#include "nlohmann/json.hpp"

namespace ddp::config {
namespace {

constexpr double kMostSeconds = 1e12;

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

// A record of metrics.jsonl; nullopt for another line.
std::optional<nlohmann::json> ParseRecord(absl::string_view line) {
  nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) return std::nullopt;
  for (const char* name : {"step", "time"}) {
    if (!record.contains(name) || !record[name].is_number()) return std::nullopt;
  }
  return record;
}

// A number in the text of this name; -1 if there is none.
int64_t NumberIn(const nlohmann::json& record, const char* name) {
  constexpr int64_t kMost = 1'000'000'000'000'000;
  int64_t number = 0;
  const auto text = record.find(name);
  if (text == record.end() || !text->is_string()) return -1;
  if (!absl::SimpleAtoi(text->get<std::string>(), &number) || number > kMost) return -1;
  return std::max<int64_t>(number, -1);
}

bool IsEpoch(const nlohmann::json& record) {
  const auto event = record.find("event");
  return event != record.end() && *event == "epoch";
}

// Of the last event "epoch", and the records behind it.
std::optional<Counts> CountsIn(absl::string_view metrics) {
  std::optional<Counts> counts;
  Counts at_event;
  double step_at_event = 0;
  for (absl::string_view line : absl::StrSplit(metrics, '\n')) {
    const std::optional<nlohmann::json> record = ParseRecord(line);
    if (!record) continue;
    const double step = (*record)["step"].get<double>();
    if (IsEpoch(*record)) {
      const Counts found = {.epoch = NumberIn(*record, "epoch"),
                            .epochs = NumberIn(*record, "epochs"),
                            .step = NumberIn(*record, "step_in_epoch"),
                            .steps = NumberIn(*record, "steps")};
      if (found.epoch < 1 || found.epochs < 1 || found.step < 0 || found.steps < 1) continue;
      counts = at_event = found;
      step_at_event = step;
    } else if (counts && !record->contains("event") && !record->contains("hyper_parameters")) {
      const double since =
          std::clamp(step - step_at_event, 0.0, static_cast<double>(counts->steps));
      counts->step = std::min(at_event.step + static_cast<int64_t>(since), counts->steps);
    }
  }
  return counts;
}

// When the last attempt has begun, as the time at the end of its line says; in seconds since 1970.
std::optional<double> BeginOf(absl::string_view attempts) {
  attempts = absl::StripTrailingAsciiWhitespace(attempts);
  const size_t comma = attempts.rfind(", ");
  if (comma == absl::string_view::npos) return std::nullopt;
  absl::Time time;
  std::string error;
  if (!absl::ParseTime("%Y-%m-%dT%H:%M:%SZ", attempts.substr(comma + 2), &time, &error)) {
    return std::nullopt;
  }
  return absl::ToDoubleSeconds(time - absl::UnixEpoch());
}

// The value of max_steps, in whatever group; 0 if there is none.
int64_t MaxSteps(absl::string_view config) {
  for (absl::string_view line : absl::StrSplit(config, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    int64_t steps = 0;
    if (absl::ConsumePrefix(&line, "max_steps: ") && absl::SimpleAtoi(line, &steps)) return steps;
  }
  return 0;
}

struct Pace {
  double step = 0;  // the last, of the run
  double seconds_per_step = 0;
};

// Of the steps since the last start of the job, which was not before `begin`; nullopt if there are
// too few.
std::optional<Pace> PaceIn(absl::string_view metrics, std::optional<double> begin) {
  struct Point {
    double step = 0, time = 0;
  };
  int count = 0;
  Point first, last;
  for (absl::string_view line : absl::StrSplit(metrics, '\n')) {
    const std::optional<nlohmann::json> record = ParseRecord(line);
    if (!record || IsEpoch(*record)) continue;
    const Point point = {(*record)["step"].get<double>(), (*record)["time"].get<double>()};
    if (record->contains("event")) {
      count = 0;  // an end: what follows is of another start
      continue;
    }
    if (record->contains("hyper_parameters")) continue;  // of a start
    // One that was killed has no end. Its last second may be the first of the next.
    if (begin && point.time < *begin + 1) continue;
    if (count++ == 0) first = point;
    last = point;
  }
  if (count == 0 || last.step <= first.step || last.time <= first.time) return std::nullopt;
  return Pace{.step = last.step,
              .seconds_per_step = (last.time - first.time) / (last.step - first.step)};
}

std::string ShortTime(double seconds) {
  // Not a number counts as nothing.
  const auto whole =
      static_cast<int64_t>((seconds > 0 ? std::min(seconds, kMostSeconds) : 0) + 0.5);
  if (whole < 60) return absl::StrCat(whole, "s");
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 48 * 3600) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

}  // namespace

JobProgress ProgressIn(const ProgressFiles& files) {
  std::optional<Counts> counts = CountsIn(files.metrics);
  if (!counts) {
    for (absl::string_view line : absl::StrSplit(files.log, absl::ByAnyChar("\n\r"))) {
      if (const std::optional<Counts> found = ParseLine(line)) counts = found;
    }
  }
  if (!counts) return {};
  JobProgress progress = {.epoch = absl::StrCat(counts->epoch, "/", counts->epochs), .eta = ""};
  if (const std::optional<Pace> pace = PaceIn(files.metrics, BeginOf(files.attempts))) {
    double left =
        static_cast<double>(counts->epochs - counts->epoch) * static_cast<double>(counts->steps) +
        static_cast<double>(counts->steps - counts->step);
    const int64_t max_steps = MaxSteps(files.config);
    if (max_steps > 0) left = std::min(left, static_cast<double>(max_steps) - pace->step);
    progress.eta = ShortTime(left * pace->seconds_per_step);
  }
  return progress;
}

JobProgress ReadProgress(const std::string& folder) {
  const auto read = [&](const char* name) {
    return ReadFile(absl::StrCat(folder, "/", name)).value_or("");
  };
  const std::string log = read(launchers::BatchJob::kLog), metrics = read("metrics.jsonl"),
                    attempts = read(launchers::BatchJob::kAttempts), config = read("config.yaml");
  return ProgressIn({.log = log, .metrics = metrics, .attempts = attempts, .config = config});
}

}  // namespace ddp::config
