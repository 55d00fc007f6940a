// The exit code that a status asks for, where it is not that of any error.
//
//   return EndedBy(SIGTERM);                           // 143, and nothing is printed
//   return WithExitCode(absl::AbortedError("…"), 70);  // an error, whose exit code is 70
//
// Functions are thread-safe.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp {

// A run that was ended for an anomaly in its losses or gradients (ddp/trainer/guard/guard.h) has
// this code, sysexits' EX_DATAERR. A launcher of ours that restarts failed ranks does not repeat
// such a run, which would come to the same step.
inline constexpr int kAnomalyExitCode = 65;

// `code`: from 1 to 255; `status` is not OK.
absl::Status WithExitCode(absl::Status status, int code);

// nullopt: it asks for none.
std::optional<int> ExitCodeIn(const absl::Status& status);

// A program was asked to stop by `signal` and has done so in good order: no error, but its exit
// code is 128 + signal. All ranks of a job return it alike. Cancelled.
absl::Status EndedBy(int signal);
bool HasEndedBySignal(const absl::Status& status);

// Wrong options, or variables of a launcher, give this code.
inline constexpr int kUsageExitCode = 2;

// Whether another attempt would end with the same error. Launchers of ours do not make it.
constexpr bool WillRepeat(int exit_code) {
  return exit_code == kUsageExitCode || exit_code == kAnomalyExitCode;
}

}  // namespace ddp
