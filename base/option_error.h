// Errors about options. The status carries the option's path, its value and the problem as a
// payload, so that a program can show the option as its user wrote it without parsing messages.
//
//   return OptionError("optimizer.lr", "-1", "must be at least 0");
//   // message(): "optimizer.lr=-1 must be at least 0"
//   // a program that was given --lr=-1 prints "--lr=-1 must be at least 0"
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp {

struct OptionProblem {
  std::string path;     // "optimizer.lr"; relative to the struct that was validated
  std::string value;    // as text
  std::string problem;  // "must be at least 0"
};

// Functions are thread-safe.
absl::Status OptionError(absl::string_view path, absl::string_view value, absl::string_view problem,
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// The payload of an error that OptionError made, also after Annotate; nullopt for other errors.
std::optional<OptionProblem> ProblemOf(const absl::Status& status);

// These carry an error across a process boundary as text. The first returns the payload of an error
// that OptionError made, as bytes, which are empty for other errors; the second the same status
// with such a payload, or unchanged if `payload` is not one.
std::string ProblemPayload(const absl::Status& status);
absl::Status WithProblemPayload(absl::Status status, absl::string_view payload);

// The same error with `group` prepended to the path: "gamma" becomes "schedule.gamma". Returns
// other statuses unchanged.
absl::Status InGroup(absl::string_view group, const absl::Status& status);

}  // namespace ddp
