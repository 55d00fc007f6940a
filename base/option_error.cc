#include "base/option_error.h"

#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp {
namespace {

constexpr absl::string_view kPayload = "libtorch_ddp/option";
// Occurs in no option's name, value or problem.
constexpr absl::string_view kSeparator("\0", 1);

}  // namespace

absl::Status OptionError(absl::string_view path, absl::string_view value, absl::string_view problem,
                         absl::StatusCode code) {
  return WithProblem(
      absl::Status(code, absl::StrCat(path, "=", value, " ", problem)),
      {.path = std::string(path), .value = std::string(value), .problem = std::string(problem)});
}

absl::Status WithProblem(absl::Status status, const OptionProblem& problem) {
  const auto text = absl::StrJoin({problem.path, problem.value, problem.problem}, kSeparator);
  status.SetPayload(kPayload, absl::Cord(text));
  return status;
}

std::optional<OptionProblem> ProblemOf(const absl::Status& status) {
  const std::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload) return std::nullopt;
  const std::vector<std::string> parts =
      absl::StrSplit(std::string(*payload), absl::MaxSplits(kSeparator, 2));
  if (parts.size() != 3) return std::nullopt;
  return OptionProblem{parts[0], parts[1], parts[2]};
}

absl::Status InGroup(absl::string_view group, const absl::Status& status) {
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem || group.empty()) return status;
  return OptionError(absl::StrCat(group, ".", problem->path), problem->value, problem->problem,
                     status.code());
}

}  // namespace ddp
