// Decides when and how a run saves: at the ends of epochs, between steps, and on a thread of its
// own. Private to this folder.
//
//   Saver saver(run);
//   saver.Begin(store, stops);
//   do {
//     TakeStep();
//     DDP_RETURN_IF_ERROR(saver.AfterStep(/*more=*/…));  // may save
//   } while (…);
//   if (saver.IsDue() || …) DDP_RETURN_IF_ERROR(saver.Save(checkpoint::EpochName(3)));
//   DDP_RETURN_IF_ERROR(saver.Finish());
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/trainer/async_save.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/run.h"
#include "ddp/trainer/step_agreement.h"
#include "ddp/trainer/stop_requests.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::trainer {

// Thread-compatible. All ranks make the same calls.
class Saver {
 public:
  // `run` has been set up, and outlives this.
  explicit Saver(Run& run);

  // Call it before the first step. `store` is of this run alone; null with a world size of 1.
  // `stops` outlives this. Throws c10::Error if the store is lost.
  void Begin(const c10::intrusive_ptr<c10d::Store>& store, StopRequests& stops);

  // Call it if the run goes on from another checkpoint, Run::resumed_from, than Begin has found. No
  // save is under way.
  void Resumed();

  // Call it after each step. Saves if that is due and the epoch has `more` steps, which the run
  // takes: as a run that is stopped here does, but so that the run is not changed by it. Otherwise
  // IsDue says at the end of the epoch that the run is to save there. Collective if it saves, or if
  // a rank's save has failed: then that is the result on all ranks, of one step.
  absl::Status AfterStep(bool more) {
    saved_here_.clear();
    return agreement_ || options_.every_steps > 0 ? SaveIfDue(more) : absl::OkStatus();
  }
  bool IsDue() const { return is_due_; }

  // Collective. Saves, with Run::metrics, or begins to: then it has waited for the save before,
  // whose failure is the result on all ranks. OK where the run goes on after a failure, in runs
  // that do not save, and if it has saved under this name since the last step, or has not taken one
  // since it went on from this checkpoint. `is_last`: the run ends, so that its failure, which no
  // next save makes up for, is an error in any case.
  absl::Status Save(const std::string& name, bool is_last = false);

  // Collective. Waits for the save that has begun; its failure is the result on all ranks.
  absl::Status Finish();

  // Call it after the last AfterStep, on all ranks.
  void Close();

  // The path of checkpoint `name`, if it was the last that was saved; else empty. Call it after
  // Finish.
  std::string PathOf(const std::string& name) const { return name == name_ ? path_ : ""; }

  // How long the longest save took, so far.
  absl::Duration longest() const { return longest_; }

 private:
  bool Saves() const;
  bool AsksForCommonStep() const;
  bool IsWanted() const;
  absl::Status SaveIfDue(bool more);
  absl::Status SaveWithinEpoch();
  absl::Status JoinLast();
  absl::Status NoteSaved(const absl::StatusOr<std::string>& saved, absl::Duration took);

  Run& run_;
  const CheckpointOptions& options_;
  StopRequests* stops_ = nullptr;
  std::optional<StepAgreement> agreement_;
  absl::Time last_ = absl::InfinitePast();  // when the run went on after a save
  bool is_due_ = false;
  bool is_last_ = false;    // of the save that has begun
  std::string saved_here_;  // the name of a save since the last step
  std::string name_;        // of the last save, unless it has failed
  std::string path_;        // likewise, once it has ended
  absl::Duration longest_;
  std::optional<AsyncSave> async_;  // of runs that save so
};

}  // namespace ddp::trainer
