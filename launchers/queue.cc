#include "launchers/queue.h"

#include <errno.h>

#include <cstdio>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

std::string PathOf(const std::string& folder, const char* file) {
  return absl::StrCat(folder, "/", file);
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

}  // namespace ddp::launchers
