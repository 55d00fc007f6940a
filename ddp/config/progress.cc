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

// A number in the text of this name; -1 if there is none.
int64_t NumberIn(const nlohmann::json& record, const char* name) {
  constexpr int64_t kMost = 1'000'000'000'000'000;
  int64_t number = 0;
  const auto text = record.find(name);
  if (text == record.end() || !text->is_string()) return -1;
  if (!absl::SimpleAtoi(text->get<std::string>(), &number) || number > kMost) return -1;
  return std::max<int64_t>(number, -1);
}

// Of a line of metrics.jsonl.
struct Record {
  enum class Kind { kValues, kEpoch, kEvent };
  Kind kind = Kind::kValues;
  double step = 0, time = 0;
  Counts epoch = {};  // of the event "epoch", which is kEpoch
};

// nullopt for a line that says nothing of the progress.
std::optional<Record> ParseRecord(absl::string_view line) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  for (const char* name : {"step", "time"}) {
    if (!json.contains(name) || !json[name].is_number()) return std::nullopt;
  }
  Record record = {.step = json["step"].get<double>(), .time = json["time"].get<double>()};
  const auto event = json.find("event");
  if (event == json.end()) {
    if (json.contains("hyper_parameters")) return std::nullopt;  // of a start
    return record;
  }
  record.kind = Record::Kind::kEvent;
  if (*event != "epoch") return record;
  record.kind = Record::Kind::kEpoch;
  record.epoch = {.epoch = NumberIn(json, "epoch"),
                  .epochs = NumberIn(json, "epochs"),
                  .step = NumberIn(json, "step_in_epoch"),
                  .steps = NumberIn(json, "steps")};
  const auto& [epoch, epochs, step, steps] = record.epoch;
  if (epoch < 1 || epochs < 1 || step < 0 || steps < 1) return std::nullopt;
  return record;
}

std::vector<Record> RecordsIn(absl::string_view metrics) {
  std::vector<Record> records;
  for (absl::string_view line : absl::StrSplit(metrics, '\n')) {
    if (const std::optional<Record> record = ParseRecord(line)) records.push_back(*record);
  }
  return records;
}

// Of the last event "epoch", and the values behind it.
std::optional<Counts> CountsIn(const std::vector<Record>& records) {
  std::optional<Counts> counts;
  Record event;
  for (const Record& record : records) {
    if (record.kind == Record::Kind::kEpoch) {
      event = record;
      counts = record.epoch;
    } else if (counts && record.kind == Record::Kind::kValues) {
      const double since =
          std::clamp(record.step - event.step, 0.0, static_cast<double>(counts->steps));
      counts->step = std::min(event.epoch.step + static_cast<int64_t>(since), counts->steps);
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
std::optional<Pace> PaceIn(const std::vector<Record>& records, std::optional<double> begin) {
  int count = 0;
  Record first, last;
  for (const Record& record : records) {
    // An end: what follows is of another start.
    if (record.kind == Record::Kind::kEvent) count = 0;
    if (record.kind != Record::Kind::kValues) continue;
    // One that was killed has no end. Its last second may be the first of the next.
    if (begin && record.time < *begin + 1) continue;
    if (count++ == 0) first = record;
    last = record;
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
  const std::vector<Record> records = RecordsIn(files.metrics);
  std::optional<Counts> counts = CountsIn(records);
  if (!counts) {
    for (absl::string_view line : absl::StrSplit(files.log, absl::ByAnyChar("\n\r"))) {
      if (const std::optional<Counts> found = ParseLine(line)) counts = found;
    }
  }
  if (!counts) return {};
  JobProgress progress = {.epoch = absl::StrCat(counts->epoch, "/", counts->epochs), .eta = ""};
  if (const std::optional<Pace> pace = PaceIn(records, BeginOf(files.attempts))) {
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
