// Errors about options. The option's name, its value and the problem are data of the status, so
// that a program can show the option as its user wrote it and nobody has to parse a message.
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
  std::string path;     // "optimizer.lr"; of a library's own struct, without the levels above it
  std::string value;    // as text
  std::string problem;  // "must be at least 0"
};

absl::Status OptionError(absl::string_view path, absl::string_view value, absl::string_view problem,
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// What an error is about, where OptionError made it; annotations in front do not matter.
std::optional<OptionProblem> ProblemOf(const absl::Status& status);

// The same error, one level further out: path "gamma" becomes "schedule.gamma". Other statuses stay
// as they are.
absl::Status InGroup(absl::string_view group, const absl::Status& status);

}  // namespace ddp
