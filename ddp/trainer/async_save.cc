#include "ddp/trainer/async_save.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/time/clock.h"
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

}  // namespace

AsyncSave::~AsyncSave() {
  if (in_flight_ == nullptr) return;
  ranks_.GiveUpAt(absl::Now() + kPatienceAfterFailure);
  in_flight_->thread.join();
}

absl::Status AsyncSave::Start(const std::string& name, checkpoint::State state,
                              checkpoint::SaveOptions options) {
  if (!manager_.all_ranks_write()) {
    // The thread has no process group that it could gather over.
    DDP_ASSIGN_OR_RETURN(state,
                         checkpoint::Consolidate(std::move(state), session_, MoveOver(session_)));
    // What only rank 0 writes need not be copied elsewhere.
    if (!session_.is_main()) state = {};
  }
  DDP_ASSIGN_OR_RETURN(state, manager_.WhatThisRankWrites(std::move(state), options));
  auto in_flight = std::make_unique<InFlight>();
  const auto prepare = [&]() -> absl::Status {
    DDP_ASSIGN_OR_RETURN(checkpoint::State copy, staging_.Copy(state));
    if (check_staging_) DDP_RETURN_IF_ERROR(checkpoint::CheckCopy(state, copy));
    if (options.extra_ckpt) {
      DDP_ASSIGN_OR_RETURN(const c10::IValue extra, staging_.Add(*options.extra_ckpt));
      options.extra_ckpt = extra.toGenericDict();
    }
    in_flight->thread = std::thread([&manager = manager_, &save = *in_flight, name,
                                     copy = std::move(copy), options = std::move(options),
                                     begins = in_flight->begins.get_future()]() mutable {
      if (!begins.get()) return;
      LowerPriority();
      const absl::Time began = absl::Now();
      save.ended.saved =
          CatchStatus("", [&] { return manager.Save(name, std::move(copy), options); });
      save.ended.took = absl::Now() - began;
      save.has_ended = true;
    });
    return absl::OkStatus();
  };
  const absl::Status prepared = session_.Agree(CatchStatus("", prepare));
  if (in_flight->thread.joinable()) in_flight->begins.set_value(prepared.ok());
  if (prepared.ok()) {
    in_flight_ = std::move(in_flight);
  } else if (in_flight->thread.joinable()) {
    in_flight->thread.join();
  }
  return prepared;
}

std::optional<AsyncSave::Ended> AsyncSave::Join() {
  if (in_flight_ == nullptr) return std::nullopt;
  in_flight_->thread.join();
  return std::move(std::exchange(in_flight_, nullptr)->ended);
}

}  // namespace ddp::trainer
