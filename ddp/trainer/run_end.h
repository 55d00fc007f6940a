// Why a run has ended.
//
//   return report.end.status();  // in the body of session::Run: exit code 128 + n after signal n,
//                                // without a line of Run's own
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ddp::trainer {

enum class EndReason {
  kEnd,         // all epochs are complete
  kMaxSteps,    // TrainerOptions::max_steps
  kStopAtStep,  // TrainerOptions::stop_at_step
  kMaxTime,     // TrainerOptions::max_time
  kCallback,    // a rank's on_step, or another callback, has asked for it
  kSignal,      // one of TrainerOptions::stop_signals
};

// Why a run has ended; the same on all ranks.
struct RunEnd {
  EndReason reason = EndReason::kEnd;
  int signal = 0;        // its number, of kSignal
  std::string why = "";  // of kCallback, what the callback has said
  // The checkpoint from which a run that stopped early goes on; empty: none was saved.
  std::string saved = "";

  // "end", "max_steps", "stop_at_step", "max_time", "callback", "signal TERM".
  std::string Name() const;
  // Whether there is no time for an evaluation.
  bool urgent() const { return reason == EndReason::kSignal || reason == EndReason::kMaxTime; }
  // Whether the run was to go on, and can be resumed.
  bool early() const { return reason != EndReason::kEnd && reason != EndReason::kMaxSteps; }
  // What the body of session::Run returns after it: OK, or EndedBy(signal), so that the exit code
  // is 128 + the signal.
  absl::Status status() const;
};

}  // namespace ddp::trainer
