// Whether the ranks of a job that has failed are started again, and when.
//
//   RestartPolicy policy(/*max_restarts=*/10);
//   const RestartPolicy::Decision next = policy.AfterFailure(/*exit_code=*/137, board.Read());
//   if (next.restart) absl::SleepFor(next.wait);
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "base/progress_board.h"

namespace ddp::launchers {

// The first restart is at once, and so is each after an attempt that came further than all before
// it. The second restart without such progress waits a second, each later one twice as long as the
// one before, a minute at most. After three restarts without progress the job ends; not if no
// attempt has said how far it came (base/progress_board.h), as programs without the trainer do not.
// Errors that would come again (base/exit_code.h) are not repeated. A pure value: no clock, no
// processes.
class RestartPolicy {
 public:
  struct Decision {
    bool restart = false;
    absl::Duration wait = absl::ZeroDuration();
    // Why the job ends, for after the description of its failure; empty if it does not, and if it
    // was never to be restarted.
    std::string why = "";
  };

  explicit RestartPolicy(int max_restarts) : max_restarts_(max_restarts) {}

  // `exit_code`: of the rank that failed. `progress`: nullopt if the attempt did not say.
  Decision AfterFailure(int exit_code, const std::optional<Progress>& progress);

  int restarts() const { return restarts_; }

 private:
  const int max_restarts_;
  int restarts_ = 0;
  int without_progress_ = 0;         // restarts, since the last progress
  std::optional<int64_t> furthest_;  // step of all attempts; before them, where the first began
  std::optional<Progress> last_;     // of the last attempt that said
};

}  // namespace ddp::launchers
