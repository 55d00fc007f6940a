#include "ddp/trainer/async_save.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/process_limits.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {
namespace {

// Maximum wait for other ranks, by the thread of a run that has failed: these may be dead, which is
// not found once the process group is aborted.
constexpr absl::Duration kPatienceAfterFailure = absl::Seconds(10);

// Of this thread, and of those that it starts: training goes first. It matters where there are
// fewer cores than threads. Where that is not permitted, all is written nevertheless.
void LowerPriority() {
  const sched_param none = {};
  (void)::sched_setscheduler(0, SCHED_BATCH, &none);
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
}

// The reverse, for a thread that another one waits for: with a low priority, other programs would
// make the run wait. Few users are permitted to do that; for the others it has no effect.
void RestorePriority(pid_t thread) {
  const sched_param none = {};
  (void)::sched_setscheduler(thread, SCHED_OTHER, &none);
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(thread), ::getpriority(PRIO_PROCESS, 0));
}

}  // namespace

AsyncSave::~AsyncSave() {
  if (in_flight_ == nullptr) return;
  ranks_.GiveUpAt(absl::Now() + kPatienceAfterFailure);
  (void)Join();
}

// No rank waits for ever for another. The training threads ask each other only where all of them
// do: in a format that rank 0 writes alone at each save, else before the first one, and after one
// in which all have heard that the structure had changed, since Manager::Save decides that from
// what all ranks have told each other. All else is agreed on by the saving threads, each of which
// begins with Manager::AgreeToSave, whatever its rank has come to: one that cannot copy, or start a
// thread, says so there. A rank that does not come there, as it has failed or not heard how the
// last save ended, returns its error from the call that found it, which ends the run on all ranks
// (Session::ShareFailure); their threads then wait for kPatienceAfterFailure.
absl::Status AsyncSave::Start(const std::string& name, checkpoint::State state,
                              checkpoint::SaveOptions options) {
  std::unique_ptr<checkpoint::Gathering> gathering;
  if (!manager_.all_ranks_write()) {
    // The thread has no process group that it could gather over.
    DDP_ASSIGN_OR_RETURN(
        gathering, checkpoint::Gathering::Begin(std::move(state), session_, MoveOver(session_)));
    // A copy is compared with what was gathered.
    if (check_staging_) DDP_RETURN_IF_ERROR(gathering->MakeWhole());
    // What only rank 0 writes need not be copied elsewhere.
    state = session_.is_main() ? gathering->TakeState() : checkpoint::State();
  }
  DDP_ASSIGN_OR_RETURN(state, manager_.WhatThisRankWrites(std::move(state), options));
  auto save = std::make_unique<InFlight>();
  absl::Status staged;
  const auto stage = [&](checkpoint::TensorSource* source) {
    staged = CatchStatus("", [&] { return Stage(state, std::move(options), source, *save); });
    return absl::OkStatus();  // it is the saving threads that agree on `staged`
  };
  const bool gathers = gathering != nullptr && gathering->has_parts();
  if (gathers) DDP_RETURN_IF_ERROR(gathering->Give(stage));
  if (!gathers || !session_.is_main()) (void)stage(nullptr);
  in_flight_ = std::move(save);
  const absl::Status started = CatchStatus("starting a thread", [&] {
    in_flight_->thread =
        std::thread([this, name, staged, &save = *in_flight_] { Write(name, staged, save); });
  });
  if (started.ok()) return absl::OkStatus();
  in_flight_->ended.saved =
      AgreeToSave(name, ranks_.of_saving_thread(), ExplainThreadLimits(started));
  in_flight_->has_ended = true;
  return absl::OkStatus();
}

absl::Status AsyncSave::Stage(const checkpoint::State& state, checkpoint::SaveOptions options,
                              checkpoint::TensorSource* source, InFlight& save) {
  DDP_ASSIGN_OR_RETURN(save.state, staging_.Copy(state, source));
  if (check_staging_) DDP_RETURN_IF_ERROR(checkpoint::CheckCopy(state, save.state));
  save.options = std::move(options);
  if (save.options.extra_ckpt) {
    DDP_ASSIGN_OR_RETURN(const c10::IValue extra, staging_.Add(*save.options.extra_ckpt));
    save.options.extra_ckpt = extra.toGenericDict();
  }
  return absl::OkStatus();
}

// Collective: whether all ranks have staged the save.
absl::Status AsyncSave::AgreeToSave(const std::string& name, const Coordinator& ranks,
                                    const absl::Status& mine) const {
  const std::string saving = absl::StrCat("saving checkpoint ", manager_.PathOf(name));
  return manager_.AgreeToSave(ranks, Annotate(mine, saving));
}

// On the saving thread.
void AsyncSave::Write(const std::string& name, const absl::Status& staged, InFlight& save) {
  const absl::Time began = absl::Now();
  save.ended.saved = CatchStatus("", [&]() -> absl::StatusOr<std::string> {
    LowerPriority();
    save.thread_id = static_cast<pid_t>(::syscall(SYS_gettid));
    DDP_RETURN_IF_ERROR(AgreeToSave(name, ranks_, staged));
    return manager_.Save(name, std::move(save.state), save.options);
  });
  save.ended.took = absl::Now() - began;
  save.has_ended = true;
}

std::optional<AsyncSave::Ended> AsyncSave::Join() {
  if (in_flight_ == nullptr) return std::nullopt;
  const pid_t writing = in_flight_->thread_id;
  if (writing != 0 && !in_flight_->has_ended) RestorePriority(writing);
  if (in_flight_->thread.joinable()) in_flight_->thread.join();
  return std::move(std::exchange(in_flight_, nullptr)->ended);
}

}  // namespace ddp::trainer
