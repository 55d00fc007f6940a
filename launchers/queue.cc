#include "launchers/queue.h"

#include <errno.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/host_name.h"
#include "base/process.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

std::string PathOf(const std::string& folder, const char* file) {
  return absl::StrCat(folder, "/", file);
}

// Without what launcher local, or srun --label, puts before a line of a rank: "[rank 1] ", " 1: ".
absl::string_view WithoutRank(absl::string_view line) {
  if (absl::ConsumePrefix(&line, "[rank ")) {
    const size_t end = line.find("] ");
    return end == absl::string_view::npos ? line : line.substr(end + 2);
  }
  absl::string_view rest = absl::StripLeadingAsciiWhitespace(line);
  const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  rest.remove_prefix(digits);
  return digits > 0 && absl::ConsumePrefix(&rest, ": ") ? rest : line;
}

void ForgetSubmitting(std::vector<std::string>& ids) {
  if (!ids.empty() && IsSubmitting(ids.back())) ids.pop_back();
}

absl::Status WriteJobIds(const std::string& folder, const std::vector<std::string>& ids) {
  return WriteFileAtomically(PathOf(folder, BatchJob::kId),
                             absl::StrCat(absl::StrJoin(ids, "\n"), "\n"));
}

}  // namespace

std::unique_ptr<Launcher> FindQueue(absl::string_view name) {
  absl::StatusOr<std::unique_ptr<Launcher>> launcher = CreateLauncher(name);
  if (!launcher.ok() || !(*launcher)->Queues()) return nullptr;
  return *std::move(launcher);
}

std::unique_ptr<Launcher> FindLinkedQueue() {
  for (const std::string& name : LauncherRegistry::Names()) {
    if (std::unique_ptr<Launcher> queue = FindQueue(name)) return queue;
  }
  return nullptr;
}

std::optional<int> ReadExitCode(const std::string& folder) {
  // Makes clients of network file systems look at the folder again: they remember for up to a
  // minute that a name was not there.
  ListDirectory(folder).status().IgnoreError();
  const absl::StatusOr<std::string> text = ReadFile(PathOf(folder, BatchJob::kExitCode));
  int code = 0;
  if (!text.ok() || !absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &code)) {
    return std::nullopt;
  }
  return code;
}

absl::Status WriteExitCode(const std::string& folder, int exit_code) {
  return WriteFileAtomically(PathOf(folder, BatchJob::kExitCode), absl::StrCat(exit_code, "\n"));
}

absl::StatusOr<std::vector<std::string>> ReadJobIds(const std::string& folder) {
  const absl::StatusOr<std::string> text = ReadFile(PathOf(folder, BatchJob::kId));
  if (absl::IsNotFound(text.status())) return std::vector<std::string>();
  if (!text.ok()) return text.status();
  std::vector<std::string> ids;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    ForgetSubmitting(ids);  // this is its id
    ids.emplace_back(line);
  }
  return ids;
}

absl::Status AddJobId(const std::string& folder, const std::string& id) {
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> ids, ReadJobIds(folder));
  ForgetSubmitting(ids);
  // A job that begins at once may have added it.
  if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  return WriteJobIds(folder, ids);
}

absl::Status RemoveJobId(const std::string& folder, const std::string& id) {
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> ids, ReadJobIds(folder));
  std::erase(ids, id);
  if (ids.empty()) return RemoveTree(PathOf(folder, BatchJob::kId));
  return WriteJobIds(folder, ids);
}

bool IsSubmitting(absl::string_view id) { return absl::StartsWith(id, kSubmitting); }

namespace {

int CountLines(const std::string& file) {
  const std::string lines = ReadFile(file).value_or("");
  return static_cast<int>(std::count(lines.begin(), lines.end(), '\n'));
}

}  // namespace

int CountAttempts(const std::string& folder) {
  return CountLines(PathOf(folder, BatchJob::kAttempts));
}

void NoteAttempt(const std::string& file, absl::string_view what) {
  std::ofstream(file, std::ios::app)
      << CountLines(file) + 1 << ": " << what << ", on " << HostName() << ", "
      << absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()) << "\n";
}

absl::Status ForgetJob(const std::string& folder) {
  DDP_RETURN_IF_ERROR(RemoveTree(PathOf(folder, BatchJob::kExitCode)));
  const std::string log = PathOf(folder, BatchJob::kLog);
  const std::string previous = PathOf(folder, kPreviousLog);
  if (std::rename(log.c_str(), previous.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return FileError(errno, "cannot rename", log);
}

namespace {

// Whether a line of launcher local says no more than "rank 0 (pid 7) exited with code 1": the rank
// has said why.
bool IsExitCodeOnly(absl::string_view line) {
  constexpr absl::string_view kExited = ") exited with code ";
  const size_t exited = line.find(kExited);
  return absl::StartsWith(line, "rank ") && exited != absl::string_view::npos &&
         line.find_first_not_of("0123456789", exited + kExited.size()) == absl::string_view::npos;
}

struct LastErrors {
  absl::string_view ours;    // of a program of this repository
  absl::string_view slurms;  // of SLURM's own tools
};

LastErrors FindLastErrors(absl::string_view log) {
  absl::string_view ours, slurms;
  for (absl::string_view line : absl::StrSplit(log, absl::ByAnyChar("\n\r"))) {
    line = absl::StripAsciiWhitespace(WithoutRank(line));
    if (absl::ConsumePrefix(&line, "error: ")) {
      if (ours.empty() || !IsExitCodeOnly(line)) ours = line;
    } else if (absl::StrContains(line, ") exited with code ") &&
               absl::StrContains(line, "; restart ")) {
      ours = {};  // of launcher local: what follows is of another attempt
    } else if (absl::StartsWith(line, "slurmstepd: error: ") ||
               absl::StartsWith(line, "srun: error: ")) {
      slurms = line;
    }
  }
  return {ours, slurms};
}

}  // namespace

std::string LastErrorIn(absl::string_view log) {
  const LastErrors last = FindLastErrors(log);
  return std::string(last.ours.empty() ? last.slurms : last.ours);
}

std::string EndReason(absl::string_view log, int exit_code) {
  const int signal = exit_code - 128;
  if (signal <= 0 || signal >= NSIG) return LastErrorIn(log);
  const LastErrors last = FindLastErrors(log);
  const std::string name = absl::StrCat("signal ", SignalName(signal));
  if (absl::StrContains(last.ours, name)) return std::string(last.ours);
  if (!last.slurms.empty()) return std::string(last.slurms);
  return absl::StrCat("killed by ", name);
}

QueueWatch::QueueWatch(Launcher& queue, absl::Duration interval)
    : queue_(queue), interval_(interval) {}

absl::StatusOr<const QueueWatch::Answer*> QueueWatch::Query(const std::vector<std::string>& ids) {
  if (absl::Now() < next_) return nullptr;
  const bool first = next_ == absl::InfinitePast();
  absl::StatusOr<Answer> answer = queue_.Unfinished(ids);
  next_ = absl::Now() + interval_;
  if (answer.ok()) {
    fails_ = false;
    answer_ = *std::move(answer);
    return &answer_;
  }
  if (first) return answer.status();
  if (!std::exchange(fails_, true)) {
    std::fflush(stdout);
    std::fprintf(stderr, "the states of the jobs are unknown: %s; still waiting\n",
                 std::string(answer.status().message()).c_str());
  }
  return nullptr;
}

}  // namespace ddp::launchers
