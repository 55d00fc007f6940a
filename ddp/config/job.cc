#include "ddp/config/job.h"

#include <signal.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/json_number.h"
#include "base/process.h"
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

// Why a job ended with `exit_code`: the last error that its log has, or the signal, or the code.
std::string FailureReason(const std::string& folder, int exit_code) {
  const std::string error = LastErrorOf(folder);
  if (!error.empty()) return error;
  const int signal = exit_code - 128;
  if (signal > 0 && signal < NSIG) {
    return absl::StrCat("killed by signal ", SignalName(signal));
  }
  return absl::StrCat("exit code ", exit_code, "; see ", folder, "/", BatchJob::kLog);
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
  }
  return "";
}

JobResult ReadResult(const Job& job) {
  JobResult result;
  result.metrics = LastMetrics(absl::StrCat(job.folder, "/metrics.jsonl"));
  const std::optional<int> exit_code = launchers::ReadExitCode(job.folder);
  if (!exit_code) return result;
  result.state = *exit_code == 0 ? JobState::kFinished : JobState::kFailed;
  if (*exit_code != 0) result.reason = FailureReason(job.folder, *exit_code);
  return result;
}

std::string LastErrorOf(const std::string& folder) {
  const absl::StatusOr<std::string> log = ReadFile(absl::StrCat(folder, "/", BatchJob::kLog));
  if (!log.ok()) return "";
  return launchers::LastErrorIn(
      absl::string_view(*log).substr(log->size() > kLogTail ? log->size() - kLogTail : 0));
}

}  // namespace ddp::config
