// The ranks of a checkpoint manager whose saves run on another thread. Private to this folder.
//
//   DDP_ASSIGN_OR_RETURN(run.saving_ranks, SavingRanks::Create(session));
//   DDP_ASSIGN_OR_RETURN(run.manager, checkpoint::Manager::Create(options, *run.saving_ranks));
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "base/status.h"
#include "ddp/session/session.h"

namespace ddp::trainer {

// The session's for the training thread, which makes the manager and resumes; for any other thread,
// which saves, a coordinator of its own. One such thread at a time.
class SavingRanks final : public Coordinator {
 public:
  // Collective, on the training thread: the same errors on all ranks. Unavailable if the store is
  // lost.
  static absl::StatusOr<std::unique_ptr<SavingRanks>> Create(const session::Session& session) {
    std::unique_ptr<SavingRanks> ranks(new SavingRanks(session));
    const std::atomic<int64_t>& deadline = ranks->deadline_;
    auto other =
        session.ForThread([&deadline] { return absl::ToUnixNanos(absl::Now()) > deadline; });
    DDP_RETURN_IF_ERROR(session.Agree(other.status()));
    ranks->other_ = *std::move(other);
    return ranks;
  }

  int rank() const override { return session_.rank(); }
  int size() const override { return session_.size(); }
  absl::Status Agree(const absl::Status& mine) const override { return Current().Agree(mine); }
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override {
    return Current().Broadcast(value);
  }
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    return Current().AllGather(mine);
  }
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const override {
    return Current().Gather(mine);
  }

  // What the other thread uses, also for the training thread where that thread could not start.
  const Coordinator& of_saving_thread() const { return *other_; }

  // The other thread waits for other ranks until `deadline` at most. Thread-safe.
  void GiveUpAt(absl::Time deadline) { deadline_ = absl::ToUnixNanos(deadline); }

 private:
  explicit SavingRanks(const session::Session& session) : session_(session) {}

  const Coordinator& Current() const {
    if (std::this_thread::get_id() == training_thread_) return session_;
    return *other_;
  }

  const session::Session& session_;
  const std::thread::id training_thread_ = std::this_thread::get_id();
  std::atomic<int64_t> deadline_{absl::ToUnixNanos(absl::InfiniteFuture())};
  std::unique_ptr<Coordinator> other_;
};

}  // namespace ddp::trainer
