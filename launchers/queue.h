// Launchers that queue jobs, and the files from which later calls read a job's state.
//
//   if (const std::unique_ptr<Launcher> queue = FindQueue(options.name)) {
//     DDP_RETURN_IF_ERROR(queue->Submit(options, {job}, 0));
//   }
//   if (const std::optional<int> code = ReadExitCode(job.folder)) return *code;  // it has ended
//   LastErrorIn("[rank 1] error: --lr=-1 must be at least 0\n");  // "--lr=-1 must be at least 0"
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "launchers/launcher.h"

namespace ddp::launchers {

// The launcher `name` if its jobs wait in a queue; null for others, "auto" and unknown names.
std::unique_ptr<Launcher> FindQueue(absl::string_view name);

// BatchJob::kExitCode in a job's folder; nullopt if it has not ended, or not yet written it.
// Thread-safe.
std::optional<int> ReadExitCode(const std::string& folder);
absl::Status WriteExitCode(const std::string& folder, int exit_code);

// Call it before a job is started or submitted again. Removes kId and kExitCode, and renames the
// log to kPreviousLog, so that its errors are not attributed to the new attempt.
inline constexpr char kPreviousLog[] = "job.log.previous";
absl::Status ForgetJob(const std::string& folder);

// The last line of a job's log that a program of this repository marks as an error ("error: …"),
// without that mark and without the prefix that launcher local puts before lines of ranks; failing
// that, the last error of SLURM's own tools; failing that, empty. Thread-safe.
std::string LastErrorIn(absl::string_view log);

}  // namespace ddp::launchers
