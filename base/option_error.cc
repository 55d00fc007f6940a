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

std::optional<OptionProblem> Parse(absl::string_view payload) {
  const std::vector<std::string> parts = absl::StrSplit(payload, absl::MaxSplits(kSeparator, 2));
  if (parts.size() != 3) return std::nullopt;
  return OptionProblem{parts[0], parts[1], parts[2]};
}

}  // namespace

absl::Status OptionError(absl::string_view path, absl::string_view value, absl::string_view problem,
                         absl::StatusCode code) {
  return WithProblemPayload(absl::Status(code, absl::StrCat(path, "=", value, " ", problem)),
                            absl::StrJoin({path, value, problem}, kSeparator));
}

std::string ProblemPayload(const absl::Status& status) {
  const std::optional<absl::Cord> payload = status.GetPayload(kPayload);
  return payload ? std::string(*payload) : "";
}

absl::Status WithProblemPayload(absl::Status status, absl::string_view payload) {
  if (Parse(payload)) status.SetPayload(kPayload, absl::Cord(payload));
  return status;
}

std::optional<OptionProblem> ProblemOf(const absl::Status& status) {
  return Parse(ProblemPayload(status));
}

absl::Status InGroup(absl::string_view group, const absl::Status& status) {
  const std::optional<OptionProblem> problem = ProblemOf(status);
  if (!problem || group.empty()) return status;
  return OptionError(absl::StrCat(group, ".", problem->path), problem->value, problem->problem,
                     status.code());
}

}  // namespace ddp
