// One rank's wish to stop, made the last step of all ranks.
//
//   StopAgreement stop(store, rank, world_size, /*first_step=*/position.step + 1);
//   do {
//     TakeStep();
//     if (SignalReceived()) stop.Request();                  // on any rank
//     DDP_ASSIGN_OR_RETURN(more, stop.Enter(++next_step));  // the same on all ranks
//   } while (more);
//
// Steps cost nothing: each rank has a thread that waits in the store for a wish. It then tells
// which step its rank has entered, and the rank enters no other until all ranks have told theirs.
// The greatest of them is the last step: every rank can still take it, and one has begun it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// One object per rank and run, made on all ranks. One thread calls its functions.
class StopAgreement {
 public:
  // `store`: of this run alone (prefix it); null in a world of one. `first_step` is entered by all
  // ranks, whatever is asked for before it ends.
  StopAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                int64_t first_step);
  // Without Close before, for a run that failed: nobody is told, nobody is waited for.
  ~StopAgreement();

  StopAgreement(const StopAgreement&) = delete;
  StopAgreement& operator=(const StopAgreement&) = delete;

  // This rank wishes to stop. If all ranks do so in the same step, it is the last one; otherwise
  // that step or the next.
  void Request();

  // Whether the ranks take `step`, the one after that which this rank has entered last. All ranks
  // call it for the same steps. Waits for others only once one has asked to stop: DeadlineExceeded
  // or Unavailable if one does not answer.
  absl::StatusOr<bool> Enter(int64_t step);

  // To be called once no rank will call Enter: releases the threads of all ranks.
  void Close();

 private:
  struct State;
  std::shared_ptr<State> state_;
  bool closed_ = false;
};

}  // namespace ddp::trainer
