// Stops all ranks after the same step when any rank asks to stop.
//
//   StopAgreement stop(store, rank, world_size, /*first_step=*/position.step + 1);
//   do {
//     TakeStep();
//     if (SignalReceived()) stop.Request();                 // on any rank
//     DDP_ASSIGN_OR_RETURN(more, stop.Enter(++next_step));  // the same on all ranks
//   } while (more);
//
// Steps without a request cost no communication: on each rank a thread waits on the store for a
// request. Then it publishes which step its rank has entered, and the rank enters no further step
// before all ranks have published theirs. The maximum is the last step: some rank has entered it
// already, and all others still can.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// One object per rank and run, on all ranks. Thread-compatible. Uses the store, not the process
// group.
class StopAgreement {
 public:
  // `store`: for this run only (use a PrefixStore); null with a world size of 1. All ranks take
  // `first_step`, even if a rank asks to stop before its end. `wait`: maximum time that the thread
  // outlives an object that was not closed.
  StopAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, int64_t first_step,
                std::chrono::milliseconds wait = std::chrono::minutes(1));
  // Without a prior Close, as after a failed run, it neither tells other ranks nor waits for them.
  ~StopAgreement();

  StopAgreement(const StopAgreement&) = delete;
  StopAgreement& operator=(const StopAgreement&) = delete;

  // Asks to stop. The last step is the current one if all ranks ask in the same step; otherwise the
  // current one or the next. Throws c10::Error if the store is lost.
  void Request();

  // Whether the ranks take `step`, which must be the successor of the last one entered. All ranks
  // call it for the same steps. Waits for other ranks only after a request: DeadlineExceeded or
  // Unavailable if one does not answer.
  absl::StatusOr<bool> Enter(int64_t step);

  // Call it after the last Enter on all ranks: ends the threads of all ranks.
  void Close();

 private:
  struct State;
  std::shared_ptr<State> state_;
  bool closed_ = false;
};

}  // namespace ddp::trainer
