#include "launchers/local/restart_policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"

namespace ddp::launchers {
namespace {

constexpr int kMostWithoutProgress = 3;
constexpr absl::Duration kFirstWait = absl::Seconds(1);
constexpr absl::Duration kLongestWait = absl::Minutes(1);
constexpr int kMostDoublings = 10;  // beyond the longest wait

}  // namespace

RestartPolicy::Decision RestartPolicy::AfterFailure(int exit_code,
                                                    const std::optional<Progress>& progress) {
  if (max_restarts_ == 0) return {};
  if (WillRepeat(exit_code)) {
    return {.why = absl::StrCat("not restarted: an error with exit code ", exit_code,
                                " would come again")};
  }
  bool progressed = false;
  if (progress) {
    if (!furthest_) furthest_ = progress->begun_at;
    progressed = progress->step > *furthest_;
    furthest_ = std::max(*furthest_, progress->step);
    last_ = progress;
  }
  if (restarts_ > 0) without_progress_ = progressed ? 0 : without_progress_ + 1;
  if (last_ && without_progress_ >= kMostWithoutProgress) {
    Decision end{.why = absl::StrCat("restarted ", without_progress_, " times from step ",
                                     last_->begun_at, " without reaching ", *furthest_ + 1)};
    if (!last_->earlier_checkpoint.empty()) {
      absl::StrAppend(&end.why, "; an earlier checkpoint to go on from, in another folder: resume=",
                      last_->earlier_checkpoint);
    }
    return end;
  }
  if (restarts_ >= max_restarts_) {
    return {.why = absl::StrCat("restarted ", restarts_, restarts_ == 1 ? " time" : " times",
                                ", the maximum (max_restarts)")};
  }
  ++restarts_;
  Decision again{.restart = true};
  if (without_progress_ >= 2) {
    again.wait = std::min(
        kFirstWait * (int64_t{1} << std::min(without_progress_ - 2, kMostDoublings)), kLongestWait);
  }
  return again;
}

}  // namespace ddp::launchers
