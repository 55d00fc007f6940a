#include "launchers/local/output.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::launchers {
namespace {

// Leaves `streams` as it is if it returns false.
bool ParseStreams(absl::string_view text, int& streams) {
  int parsed = 0;
  if (!absl::SimpleAtoi(text, &parsed) || parsed < 0 ||
      parsed > (OutputPlan::kStdout | OutputPlan::kStderr)) {
    return false;
  }
  streams = parsed;
  return true;
}

absl::Status NoSuchRank(const char* option, const std::string& value, int rank, int ranks) {
  return OptionError(option, value,
                     absl::StrCat("names local rank ", rank, ", but there are ", ranks,
                                  ", which are counted from 0"));
}

}  // namespace

bool OutputPlan::Streams::Has(int local_rank, int stream) const {
  const auto own = of_rank.find(local_rank);
  return ((own == of_rank.end() ? all : own->second) & stream) != 0;
}

absl::StatusOr<OutputPlan::Streams> OutputPlan::Parse(const char* option, const std::string& text,
                                                      int ranks) {
  Streams streams;
  if (text.empty() || ParseStreams(text, streams.all)) return streams;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(part, absl::MaxSplits(':', 1));
    int rank = 0;
    if (!absl::SimpleAtoi(pair.first, &rank) || rank < 0 ||
        !ParseStreams(pair.second, streams.of_rank[rank])) {
      return OptionError(option, text,
                         "is neither 0 to 3 (1: stdout, 2: stderr, 3: both) nor LOCAL_RANK:N,… "
                         "with such N");
    }
    if (rank >= ranks) return NoSuchRank(option, text, rank, ranks);
  }
  return streams;
}

absl::StatusOr<OutputPlan> OutputPlan::From(const LocalOptions& options, int ranks) {
  OutputPlan plan;
  plan.folder_ = options.log_dir;
  DDP_ASSIGN_OR_RETURN(plan.redirects_, Parse("local.redirects", options.redirects, ranks));
  DDP_ASSIGN_OR_RETURN(plan.tee_, Parse("local.tee", options.tee, ranks));
  const bool wants_files = !options.redirects.empty() || !options.tee.empty();
  if (wants_files && plan.folder_.empty()) {
    return options.tee.empty()
               ? OptionError("local.redirects", options.redirects, "needs a folder: local.log_dir")
               : OptionError("local.tee", options.tee, "needs a folder: local.log_dir");
  }
  if (!wants_files && !plan.folder_.empty()) plan.tee_.all = kStdout | kStderr;
  if (options.local_ranks_filter.empty()) return plan;
  plan.shown_.emplace();
  for (absl::string_view part : absl::StrSplit(options.local_ranks_filter, ',')) {
    int rank = 0;
    if (!absl::SimpleAtoi(part, &rank) || rank < 0) {
      return OptionError("local.local_ranks_filter", options.local_ranks_filter,
                         "is no list of local ranks, as in 0,2");
    }
    if (rank >= ranks) {
      return NoSuchRank("local.local_ranks_filter", options.local_ranks_filter, rank, ranks);
    }
    plan.shown_->insert(rank);
  }
  return plan;
}

OutputPlan::Way OutputPlan::Of(int local_rank, int stream) const {
  const bool tee = tee_.Has(local_rank, stream);
  const bool redirected = redirects_.Has(local_rank, stream) && !tee;
  const bool shown = !shown_ || shown_->count(local_rank) > 0;
  return {.to_file = tee || redirected, .to_terminal = shown && !redirected};
}

std::string OutputPlan::FileOf(int attempt, int rank, int stream) const {
  return absl::StrCat(folder_, "/attempt_", attempt, "/", rank, "/",
                      stream == kStdout ? "stdout" : "stderr", ".log");
}

}  // namespace ddp::launchers
