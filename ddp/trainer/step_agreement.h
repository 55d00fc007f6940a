// Finds a step that is the same on all ranks when any rank asks for one: to stop after it, or to
// save.
//
//   StepAgreement stop(store, rank, world_size, /*first_step=*/position.step + 1);
//   do {
//     TakeStep();
//     if (SignalReceived()) stop.Request();                 // on any rank
//     DDP_ASSIGN_OR_RETURN(more, stop.Enter(++next_step));  // the same on all ranks
//   } while (more);
//
// Steps without a request cost no communication: on each rank a thread waits on the store for a
// request. Then it publishes which step its rank has entered, and the rank enters no further step
// before all ranks have published theirs. The maximum is the common step: some rank has entered it
// already, and all others still can.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// All ranks have one object each per purpose of a run. Thread-compatible. Uses the store, not the
// process group.
class StepAgreement {
 public:
  // `store` is for this object only (use a PrefixStore); null with a world size of 1. All ranks
  // take `first_step`, even if a rank asks before its end. `wait`: maximum time that the thread
  // outlives an object that was not closed.
  StepAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, int64_t first_step,
                std::chrono::milliseconds wait = std::chrono::minutes(1));
  // Without a prior Close, as after a failed run, it waits for no other rank. Rank 0's ends the
  // threads of all ranks, since the store may end with its process.
  ~StepAgreement();

  StepAgreement(const StepAgreement&) = delete;
  StepAgreement& operator=(const StepAgreement&) = delete;

  // Asks for a common step: the current one if all ranks ask in the same step; otherwise the
  // current one or the next. No effect if a rank has asked before, or this object is closed. Throws
  // c10::Error if the store is lost.
  void Request(absl::string_view note = "");

  // Whether a rank has asked, as far as this one knows.
  bool is_requested() const;

  // The note of the request that came first, and so the same on all ranks. Call it only after Enter
  // has returned false.
  std::string note() const;

  // Whether the ranks go on to `step`, which must be the successor of the last one entered. False:
  // the one before it is the common step. All ranks call it for the same steps. Waits for other
  // ranks only after a request: DeadlineExceeded or Unavailable if one does not answer.
  absl::StatusOr<bool> Enter(int64_t step);

  // Call it after Enter(step) has returned false, on all ranks: they take `step`, and may ask
  // again, for a later one. Waits for no other rank.
  void Renew(int64_t step);

  // Call it after the last Enter on all ranks: ends the threads of all ranks.
  void Close();

 private:
  struct State;
  std::shared_ptr<State> state_;
  bool closed_ = false;
};

}  // namespace ddp::trainer
