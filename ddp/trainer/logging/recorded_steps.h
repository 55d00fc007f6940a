// Whether a run has logged into a folder already.
//
//   DDP_ASSIGN_OR_RETURN(const std::optional<std::string> file, FindRecordedSteps("runs/a"));
//   if (file) …  // "runs/a/metrics.jsonl" has steps
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace ddp::trainer::logging {

// The path of a file, metrics.jsonl or an event file, with a record of a step after 0; nullopt if
// there is none, as after a run that failed before its first step, or no folder. Reads each file up
// to its first such record. Errors of base/file.h. Thread-safe.
absl::StatusOr<std::optional<std::string>> FindRecordedSteps(const std::string& log_dir);

}  // namespace ddp::trainer::logging
