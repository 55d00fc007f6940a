// Tells whether a run has logged into a folder already.
//
//   DDP_ASSIGN_OR_RETURN(const std::optional<std::string> file, FindRecordedSteps("runs/a"));
//   if (file) return HoldsAnotherLog("runs/a", *file, "go on with that run with resume=auto");
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::trainer::logging {

// The path of a file, metrics.jsonl or an event file, with a record of a step after 0; nullopt if
// there is none, as after a run that failed before its first step, or no folder. Reads each file up
// to its first such record. Errors of base/file.h. Thread-safe.
absl::StatusOr<std::optional<std::string>> FindRecordedSteps(const std::string& log_dir);

// AlreadyExists of the option log.dir, since two runs in one folder could not be told apart
// afterwards. `file`: what FindRecordedSteps has found; `to_go_on`: what the user can do besides
// choosing another folder, or empty. Thread-safe.
absl::Status HoldsAnotherLog(const std::string& log_dir, absl::string_view file,
                             absl::string_view to_go_on);

}  // namespace ddp::trainer::logging
