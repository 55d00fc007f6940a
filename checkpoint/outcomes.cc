#include "checkpoint/outcomes.h"

#include <cstddef>

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
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].ok()) continue;
    if (outcomes.size() == 1) return outcomes[rank].status();
    return Annotate(outcomes[rank].status(), absl::StrCat("rank ", rank));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
