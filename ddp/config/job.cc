#include "ddp/config/job.h"

#include <csignal>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/json_number.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"
#include "nlohmann/json.hpp"

namespace ddp::config {
namespace {

using launchers::BatchJob;

// The end of a log is enough to find its last error.
constexpr size_t kLogTail = 64 * 1024;

std::map<std::string, double> LastMetrics(const std::string& path) {
  std::map<std::string, double> metrics;
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return metrics;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    // The last line may be incomplete.
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object()) continue;
    for (const auto& [name, value] : record.items()) {
      if (const std::optional<double> number = NumberFromJson(value)) metrics[name] = *number;
    }
  }
  return metrics;
}

// The end of a job's log; empty if there is none.
std::string EndOfLog(const std::string& folder) {
  const absl::StatusOr<std::string> log = ReadFile(absl::StrCat(folder, "/", BatchJob::kLog));
  if (!log.ok()) return "";
  return log->substr(log->size() > kLogTail ? log->size() - kLogTail : 0);
}

// Why a job ended with `exit_code`: what its log or the code tells, or the code.
std::string FailureReason(const std::string& folder, int exit_code) {
  const std::string reason = launchers::EndReason(EndOfLog(folder), exit_code);
  if (!reason.empty()) return reason;
  return absl::StrCat("exit code ", exit_code, "; see ", folder, "/", BatchJob::kLog);
}

// Of signals by which a run is asked to stop.
bool IsOfStop(int exit_code) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) {
    if (exit_code == 128 + signal) return true;
  }
  return false;
}

JobState StateOfExitCode(int exit_code) {
  if (exit_code == 0) return JobState::kFinished;
  return IsOfStop(exit_code) ? JobState::kCancelled : JobState::kFailed;
}

}  // namespace

std::string Job::Description() const {
  return absl::StrJoin(overrides, " ", absl::PairFormatter("="));
}

const char* StateName(JobState state) {
  switch (state) {
    case JobState::kMissing:
      return "missing";
    case JobState::kQueued:
      return "queued";
    case JobState::kRunning:
      return "running";
    case JobState::kFinished:
      return "finished";
    case JobState::kFailed:
      return "failed";
    case JobState::kCancelled:
      return "cancelled";
    case JobState::kUnknown:
      return "unknown";
  }
  return "";
}

JobResult ReadResult(const Job& job) {
  JobResult result;
  result.metrics = LastMetrics(absl::StrCat(job.folder, "/metrics.jsonl"));
  if (const auto build = ReadFile(absl::StrCat(job.folder, "/", Job::kBuild)); build.ok()) {
    result.build = absl::StripAsciiWhitespace(*build);
  }
  const std::optional<int> exit_code = launchers::ReadExitCode(job.folder);
  if (!exit_code) return result;
  result.state = StateOfExitCode(*exit_code);
  if (result.state != JobState::kFinished) result.reason = FailureReason(job.folder, *exit_code);
  return result;
}

std::string LastErrorOf(const std::string& folder) {
  return launchers::LastErrorIn(EndOfLog(folder));
}

}  // namespace ddp::config
