// Early stops of a run: any rank asks, all stop after one step. Private to this folder.
//
//   StopRequests stops(store, session.rank(), session.size(), options, …);
//   do {
//     TakeStep();
//     DDP_ASSIGN_OR_RETURN(more, stops.GoOn());  // the same on all ranks
//   } while (more);
//   Save();
//   return Report{.end = stops.end()};
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/stop_signals.h"
#include "ddp/session/session.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/run_end.h"
#include "ddp/trainer/step_agreement.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// The store's part for one run of the session: each rank counts its runs to the same number. Null
// with a world size of 1. Throws c10::Error if the store is lost.
c10::intrusive_ptr<c10d::Store> StoreOfRun(const session::Session& session);

// Each rank of a run has one object; while it exists signals of options.stop_signals do not end the
// process. Thread-compatible. Steps without a request cost no communication, as with StepAgreement,
// which it has.
class StopRequests {
 public:
  // `store`: see StepAgreement. `began`: what options.max_time counts from. `save_time`: how long a
  // save takes, for which max_time leaves room.
  StopRequests(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
               const TrainerOptions& options, absl::Time began,
               std::function<absl::Duration()> save_time);

  // Asks as TrainerOptions::on_step does, on this rank. `why`: for RunEnd::why.
  void RequestByCallback(absl::string_view why = "");

  // Whether the ranks go on, after a step or other work between two calls; all ranks make the same
  // calls. Asks first if this rank has got a signal, or its time is up. If not, end() says why.
  // Waits for other ranks only after a request: see StepAgreement::Enter.
  absl::StatusOr<bool> GoOn();

  // Whether some rank has asked, by a signal or max_time, since GoOn has returned true, as far as
  // this one knows; asks likewise. Use it in work that such a stop is to interrupt. May throw
  // c10::Error: the store is lost.
  bool IsUrgent();
  // Collective. Work was interrupted for which this returned true on some rank: all ranks stop,
  // without a further GoOn. A signal then counts more than a callback's earlier request, which
  // alone would have let the work end.
  absl::Status Interrupt(const session::Session& session);

  // The two together, for an evaluation. The first is asked before each batch: IsUrgent. The other
  // is collective, and called after the last: whether no rank has given up. If one has, all stop.
  absl::StatusOr<bool> GivesUp();
  absl::StatusOr<bool> AreComplete(const session::Session& session, bool mine);

  // Call it after GoOn has returned false, on all ranks: they do further work, and may ask again.
  void Renew() { agreement_.Renew(turn_); }

  // The end by the request that counts; the same on all ranks. Call it only once they stop.
  RunEnd end() const;

  void Close() { agreement_.Close(); }

 private:
  void Poll();

  const StopSignals signals_;
  const absl::Time began_;
  const absl::Duration max_time_;  // infinite: no limit; each rank asks by its own
  const std::function<absl::Duration()> save_time_;
  int64_t turn_ = 1;        // of GoOn
  int interrupted_by_ = 0;  // a signal, on whatever rank
  StepAgreement agreement_;
};

}  // namespace ddp::trainer
