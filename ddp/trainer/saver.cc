#include "ddp/trainer/saver.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/name.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

// Maximum wait for other ranks, by the thread of a run that has failed: these may be dead, which is
// not found once the process group is aborted.
constexpr absl::Duration kPatienceAfterFailure = absl::Seconds(10);

// c10d logs each wait that times out.
constexpr std::chrono::hours kWaitForRequest(1);

// Of this thread, and of those that it starts: training goes first. It matters where there are
// fewer cores than threads. Where that is not permitted, all is written nevertheless.
void LowerPriority() {
  const sched_param none = {};
  (void)::sched_setscheduler(0, SCHED_BATCH, &none);
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
}

}  // namespace

Saver::Saver(Run& run) : run_(run), options_(run.options.checkpoint) {}

Saver::~Saver() {
  if (in_flight_ == nullptr) return;
  run_.saving_ranks->GiveUpAt(absl::Now() + kPatienceAfterFailure);
  in_flight_->thread.join();
}

bool Saver::Saves() const {
  return run_.manager != nullptr && (options_.every > 0 || options_.every_steps > 0 ||
                                     options_.every_minutes > 0 || options_.continuous);
}

// Whether it takes more than the number of a step to know after which one to act.
bool Saver::AsksForCommonStep() const {
  return Saves() && (options_.every_minutes > 0 || SavesAsync(options_));
}

void Saver::Begin(const c10::intrusive_ptr<c10d::Store>& store) {
  last_ = absl::Now();
  if (!AsksForCommonStep()) return;
  c10::intrusive_ptr<c10d::Store> own;
  if (store) own = c10::make_intrusive<c10d::PrefixStore>("save", store);
  agreement_.emplace(std::move(own), run_.rank(), run_.world_size(), run_.position.step + 1,
                     kWaitForRequest);
}

// Whether this rank wants all to meet after one of the next steps.
bool Saver::IsWanted() const {
  const bool in_flight = in_flight_ != nullptr && !in_flight_->has_ended;
  if (in_flight_ != nullptr && !in_flight &&
      !run_.manager->GoesOnAfter(in_flight_->saved.status())) {
    return true;
  }
  if (!run_.is_main()) return false;
  if (options_.continuous && !in_flight) return true;
  return options_.every_minutes > 0 &&
         absl::Now() - last_ >= absl::Minutes(1) * options_.every_minutes;
}

absl::Status Saver::AfterStep(bool more) {
  const int64_t step = run_.position.step;
  saved_here_.clear();
  if (Saves() && options_.every_steps > 0 && step % options_.every_steps == 0) is_due_ = true;
  if (agreement_) {
    if (IsWanted()) agreement_->Request();
    DDP_ASSIGN_OR_RETURN(const bool goes_on, agreement_->Enter(step + 1));
    if (!goes_on) {
      agreement_->Renew(step + 1);
      // If that is why a rank has asked, the run ends here.
      DDP_RETURN_IF_ERROR(Finish());
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

absl::Status Saver::Save(const std::string& name) {
  if (!Saves() || name == saved_here_) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(Finish());
  is_due_ = false;
  DDP_RETURN_IF_ERROR(run_.callbacks.Call(&Callback::OnSave, name));
  const absl::Time began = absl::Now();
  const absl::Cleanup reset = [&] { last_ = absl::Now(); };
  DDP_ASSIGN_OR_RETURN(checkpoint::State state,
                       run_.components.Capture(run_.session, run_.manager->all_ranks_write()));
  checkpoint::SaveOptions save = options_.save;
  save.metrics = run_.metrics;
  if (SavesAsync(options_)) {
    if (!run_.manager->all_ranks_write()) {
      // The thread has no process group that it could gather over.
      DDP_ASSIGN_OR_RETURN(
          state, checkpoint::Consolidate(std::move(state), run_.session, MoveOver(run_.session)));
      // What only rank 0 writes need not be copied elsewhere.
      if (!run_.is_main()) state = {};
    }
    DDP_RETURN_IF_ERROR(Start(name, std::move(state), std::move(save)));
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
  return run_.manager->GoesOnAfter(saved.status()) ? absl::OkStatus() : saved.status();
}

absl::Status Saver::Start(const std::string& name, checkpoint::State state,
                          checkpoint::SaveOptions options) {
  auto in_flight = std::make_unique<InFlight>();
  const auto prepare = [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(checkpoint::State copy, staging_.Copy(state));
    if (options_.check_staging) DDP_RETURN_IF_ERROR(checkpoint::CheckCopy(state, copy));
    if (options.extra_ckpt) {
      DDP_ASSIGN_OR_RETURN(const c10::IValue extra, staging_.Add(*options.extra_ckpt));
      options.extra_ckpt = extra.toGenericDict();
    }
    in_flight->thread = std::thread([&manager = *run_.manager, &save = *in_flight, name,
                                     copy = std::move(copy), options = std::move(options),
                                     begins = in_flight->begins.get_future()]() mutable {
      if (!begins.get()) return;
      LowerPriority();
      const absl::Time began = absl::Now();
      save.saved = CatchStatus("", [&] { return manager.Save(name, std::move(copy), options); });
      save.took = absl::Now() - began;
      save.has_ended = true;
    });
    return absl::OkStatus();
  };
  const absl::Status prepared = run_.session.Agree(CatchStatus("", prepare));
  if (in_flight->thread.joinable()) in_flight->begins.set_value(prepared.ok());
  if (prepared.ok()) {
    in_flight_ = std::move(in_flight);
  } else if (in_flight->thread.joinable()) {
    in_flight->thread.join();
  }
  return prepared;
}

absl::Status Saver::Finish() {
  if (in_flight_ == nullptr) return absl::OkStatus();
  in_flight_->thread.join();
  const std::unique_ptr<InFlight> ended = std::move(in_flight_);
  // A rank may have failed to hear how it ended.
  return run_.session.Agree(NoteSaved(ended->saved, ended->took));
}

void Saver::Close() {
  if (agreement_) agreement_->Close();
}

}  // namespace ddp::trainer
