#include "launchers/queue.h"

#include <errno.h>

#include <cstdio>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

std::string PathOf(const std::string& folder, const char* file) {
  return absl::StrCat(folder, "/", file);
}

absl::string_view WithoutRank(absl::string_view line) {
  if (!absl::StartsWith(line, "[rank ")) return line;
  const size_t end = line.find("] ");
  return end == absl::string_view::npos ? line : line.substr(end + 2);
}

}  // namespace

std::unique_ptr<Launcher> FindQueue(absl::string_view name) {
  absl::StatusOr<std::unique_ptr<Launcher>> launcher = CreateLauncher(name);
  if (!launcher.ok() || !(*launcher)->Queues()) return nullptr;
  return *std::move(launcher);
}

std::optional<int> ReadExitCode(const std::string& folder) {
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

absl::Status ForgetJob(const std::string& folder) {
  DDP_RETURN_IF_ERROR(RemoveTree(PathOf(folder, BatchJob::kExitCode)));
  DDP_RETURN_IF_ERROR(RemoveTree(PathOf(folder, BatchJob::kId)));
  const std::string log = PathOf(folder, BatchJob::kLog);
  const std::string previous = PathOf(folder, kPreviousLog);
  if (std::rename(log.c_str(), previous.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return FileError(errno, "cannot rename", log);
}

std::string LastErrorIn(absl::string_view log) {
  absl::string_view ours, slurms;
  for (absl::string_view line : absl::StrSplit(log, absl::ByAnyChar("\n\r"))) {
    line = absl::StripAsciiWhitespace(WithoutRank(line));
    if (absl::ConsumePrefix(&line, "error: ")) {
      ours = line;
    } else if (absl::StartsWith(line, "slurmstepd: error: ") ||
               absl::StartsWith(line, "srun: error: ")) {
      slurms = line;
    }
  }
  return std::string(ours.empty() ? slurms : ours);
}

}  // namespace ddp::launchers
