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

// `code`: from 1 to 255; `status` is not OK.
absl::Status WithExitCode(absl::Status status, int code);

// nullopt: it asks for none.
std::optional<int> ExitCodeIn(const absl::Status& status);

// A program was asked to stop by `signal` and has done so in good order: no error, but its exit
// code is 128 + signal. All ranks of a job return it alike. Cancelled.
absl::Status EndedBy(int signal);
bool HasEndedBySignal(const absl::Status& status);

}  // namespace ddp
