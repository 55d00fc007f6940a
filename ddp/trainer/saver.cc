#include "ddp/trainer/saver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

// c10d logs each wait that times out.
constexpr std::chrono::hours kWaitForRequest(1);

// Note of a rank that asks for a common step to end the run there.
constexpr char kFailed[] = "failed";

}  // namespace

Saver::Saver(Run& run) : run_(run), options_(run.options.checkpoint) {
  if (run.saving_ranks == nullptr) return;
  async_.emplace(run.session, *run.manager, *run.saving_ranks, options_.check_staging);
}

bool Saver::Saves() const { return run_.manager != nullptr && AsksForSaves(options_); }

// Whether it takes more than the number of a step to know after which one to act.
bool Saver::AsksForCommonStep() const {
  return Saves() && (options_.every_minutes > 0 || SavesAsync(options_));
}

void Saver::Begin(const c10::intrusive_ptr<c10d::Store>& store, StopRequests& stops) {
  stops_ = &stops;
  last_ = absl::Now();
  Resumed();
  if (!AsksForCommonStep()) return;
  c10::intrusive_ptr<c10d::Store> own;
  if (store) own = c10::make_intrusive<c10d::PrefixStore>("save", store);
  agreement_.emplace(std::move(own), run_.rank(), run_.world_size(), run_.position.step + 1,
                     kWaitForRequest);
}

// Until the next step it has what a save would write, and not each file system replaces folders.
void Saver::Resumed() {
  name_ = saved_here_ = run_.resumed_from;
  path_ = name_.empty() ? "" : run_.manager->PathOf(name_);
}

// Whether this rank wants all to save after one of the next steps.
bool Saver::IsWanted() const {
  if (!run_.is_main()) return false;
  if (options_.continuous && !async_->is_writing()) return true;
  return options_.every_minutes > 0 &&
         absl::Now() - last_ >= absl::Minutes(1) * options_.every_minutes;
}

absl::Status Saver::SaveIfDue(bool more) {
  const int64_t step = run_.position.step;
  if (Saves() && options_.every_steps > 0 && step % options_.every_steps == 0) is_due_ = true;
  if (agreement_) {
    if (async_ && async_->has_failed()) {
      agreement_->Request(kFailed);
    } else if (IsWanted()) {
      agreement_->Request();
    }
    DDP_ASSIGN_OR_RETURN(const bool goes_on, agreement_->Enter(step + 1));
    if (!goes_on) {
      const bool ends = agreement_->note() == kFailed;
      agreement_->Renew(step + 1);
      DDP_RETURN_IF_ERROR(ends ? Finish() : JoinLast());
      is_due_ = true;
    }
  }
  return is_due_ && more ? SaveWithinEpoch() : absl::OkStatus();
}

// The checkpoint has rank 0's buffers; the run goes on with what each rank has.
absl::Status Saver::SaveWithinEpoch() {
  run_.WaitForParameters();
  if (run_.rank_buffers != nullptr) run_.rank_buffers->TakeDown();
  return run_.WithSharedBuffers(
      [&] { return Save(checkpoint::EpochStepName(run_.position.epoch, run_.position.step)); });
}

absl::Status Saver::Save(const std::string& name, bool is_last) {
  if (!Saves()) return absl::OkStatus();
  if (name == saved_here_) {
    is_last_ = is_last;  // it may still be written
    return absl::OkStatus();
  }
  DDP_RETURN_IF_ERROR(JoinLast());
  is_due_ = false;
  is_last_ = is_last;
  DDP_RETURN_IF_ERROR(run_.callbacks.Call(stops_, &Callback::OnSave, name));
  const absl::Time began = absl::Now();
  const absl::Cleanup reset = [&] { last_ = absl::Now(); };
  DDP_ASSIGN_OR_RETURN(checkpoint::State state,
                       run_.components.Capture(run_.session, run_.manager->all_ranks_write()));
  checkpoint::SaveOptions save = options_.save;
  save.metrics = run_.metrics;
  if (async_) {
    DDP_RETURN_IF_ERROR(async_->Start(name, std::move(state), std::move(save)));
    name_ = saved_here_ = name;
    return absl::OkStatus();
  }
  name_ = saved_here_ = name;
  const absl::StatusOr<std::string> saved = run_.manager->Save(name, std::move(state), save);
  return NoteSaved(saved, absl::Now() - began);
}

// Returns OK if the run goes on.
absl::Status Saver::NoteSaved(const absl::StatusOr<std::string>& saved, absl::Duration took) {
  longest_ = std::max(longest_, took);
  path_ = saved.value_or("");
  if (!saved.ok()) {
    name_.clear();
    saved_here_.clear();
  }
  const bool goes_on = !is_last_ && run_.manager->GoesOnAfter(saved.status());
  return goes_on ? absl::OkStatus() : OfSave(saved.status(), options_.manager.directory);
}

// Waits for the save that has begun, and asks no other rank: what all know of it is the result on
// all. A rank that failed to hear how it ended returns an error alone, as one whose step fails.
absl::Status Saver::JoinLast() {
  const std::optional<AsyncSave::Ended> ended = async_ ? async_->Join() : std::nullopt;
  return ended ? AsOwnError(NoteSaved(ended->saved, ended->took)) : absl::OkStatus();
}

absl::Status Saver::Finish() {
  if (!async_ || !async_->has_begun()) return absl::OkStatus();
  // A rank that has failed before it began to save tells so here. The threads of the others wait
  // for its thread.
  DDP_RETURN_IF_ERROR(run_.session.Agree(absl::OkStatus()));
  return run_.session.Agree(JoinLast());
}

void Saver::Close() {
  if (agreement_) agreement_->Close();
}

}  // namespace ddp::trainer
