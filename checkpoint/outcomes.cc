#include "checkpoint/outcomes.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace ddp::checkpoint {

absl::StatusOr<Outcomes> GatherOutcomes(const Coordinator& ranks,
                                        const absl::StatusOr<std::string>& mine) {
  // The code, a blank, and the value or message.
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                       ranks.AllGather(absl::StrCat(
                           static_cast<int>(mine.status().code()), " ",
                           mine.ok() ? absl::string_view(*mine) : mine.status().message())));
  Outcomes outcomes;
  for (const std::string& text : all) {
    const size_t blank = text.find(' ');
    int code = 0;
    if (blank == std::string::npos ||
        !absl::SimpleAtoi(absl::string_view(text).substr(0, blank), &code)) {
      return absl::InternalError(absl::StrCat("'", text, "' is no outcome of a rank"));
    }
    const std::string rest = text.substr(blank + 1);
    if (code == 0) {
      outcomes.emplace_back(rest);
    } else {
      outcomes.emplace_back(absl::Status(static_cast<absl::StatusCode>(code), rest));
    }
  }
  return outcomes;
}

absl::Status FirstFailure(const Outcomes& outcomes) {
  const auto first = std::find_if(outcomes.begin(), outcomes.end(),
                                  [](const auto& outcome) { return !outcome.ok(); });
  if (first == outcomes.end()) return absl::OkStatus();
  const absl::Status& error = first->status();
  const bool of_all = std::all_of(outcomes.begin(), outcomes.end(),
                                  [&](const auto& outcome) { return outcome.status() == error; });
  const bool is_agreed = of_all && absl::StartsWith(error.message(), "rank ");
  return outcomes.size() == 1 || is_agreed
             ? error
             : Annotate(error, absl::StrCat("rank ", first - outcomes.begin()));
}

absl::Status TryingRanks::Agree(const absl::Status& mine) const {
  return Broadcast(mine.ok() ? absl::StatusOr<std::string>("") : mine).status();
}

absl::StatusOr<std::string> TryingRanks::Broadcast(const absl::StatusOr<std::string>& value) const {
  const bool sends = rank() == 0 || !value.ok();
  DDP_ASSIGN_OR_RETURN(const Outcomes outcomes,
                       GatherOutcomes(ranks_, sends ? value : absl::StatusOr<std::string>("")));
  absl::Status failed = FirstFailure(outcomes);
  if (failed.ok()) return outcomes[0];
  if (!value.ok() && absl::EndsWith(failed.message(), value.status().message())) {
    value.status().ForEachPayload(
        [&](absl::string_view key, const absl::Cord& payload) { failed.SetPayload(key, payload); });
  }
  return failed;
}

}  // namespace ddp::checkpoint
