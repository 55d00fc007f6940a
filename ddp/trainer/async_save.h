// A save on a thread of its own, while the training goes on. Private to this folder.
//
//   AsyncSave async(session, *manager, *saving_ranks, /*check_staging=*/false);
//   DDP_RETURN_IF_ERROR(async.Start("epoch_3", std::move(state), options));
//   …                                                        // steps
//   if (const auto ended = async.Join()) …ended->saved…      // its path
#pragma once

#include <sys/types.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "base/exit_code.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/staging.h"
#include "ddp/session/session.h"
#include "ddp/trainer/saving_ranks.h"

namespace ddp::trainer {

// The error of a save that ends the run. Begun again, a run whose folder is gone would make a new
// one and start from scratch, so that error has the exit code of wrong options.
inline absl::Status OfSave(const absl::Status& saved, const std::string& directory) {
  std::error_code ignored;
  const bool is_gone = absl::IsNotFound(saved) && !std::filesystem::exists(directory, ignored);
  return is_gone ? WithExitCode(saved, kUsageExitCode) : saved;
}

// The same as this rank's own: the calls of the saving thread are not the session's, so that
// Session::ShareFailure has to tell the other ranks.
inline absl::Status AsOwnError(const absl::Status& saved) {
  const absl::Status own(saved.code(), saved.message());
  const std::optional<int> exit_code = ExitCodeIn(saved);
  return exit_code ? WithExitCode(own, *exit_code) : own;
}

// Thread-compatible. All ranks make the same calls. Between Start and Join the training thread asks
// the manager for nothing but its options.
class AsyncSave {
 public:
  // The result of a save, and the time that it took.
  struct Ended {
    absl::StatusOr<std::string> saved = absl::UnknownError("");
    absl::Duration took;
  };

  // `manager` was made with `ranks`; all of them outlive this. `check_staging`: compare each copy
  // with the state.
  AsyncSave(const session::Session& session, checkpoint::Manager& manager, SavingRanks& ranks,
            bool check_staging)
      : session_(session), manager_(manager), ranks_(ranks), check_staging_(check_staging) {}
  // Waits until the thread has ended, for other ranks for some seconds only: a run that still has
  // one has failed.
  ~AsyncSave();
  AsyncSave(const AsyncSave&) = delete;
  AsyncSave& operator=(const AsyncSave&) = delete;

  // All ranks call it; none may be under way. Copies `state`, and begins to write it. The state may
  // change afterwards. Where all ranks write, only the first call is collective, and one after the
  // structure of the state has changed (Manager::WhatThisRankWrites). An error is that of what is
  // collective, on all ranks. If a rank cannot copy, or start a thread, that is the result of the
  // save on all ranks (Manager::AgreeToSave), and nothing is written.
  absl::Status Start(const std::string& name, checkpoint::State state,
                     checkpoint::SaveOptions options);

  // Whether there has been a save since the last Join. The same on all ranks.
  bool has_begun() const { return in_flight_ != nullptr; }
  // Whether it is writing. Not collective: ranks end at different times.
  bool is_writing() const { return in_flight_ != nullptr && !in_flight_->has_ended; }
  // Null: it is writing, or there is none.
  const Ended* ended() const {
    return in_flight_ != nullptr && in_flight_->has_ended ? &in_flight_->ended : nullptr;
  }

  // Whether it has ended so that the run ends, too. Not collective, as above.
  bool has_failed() const {
    return ended() != nullptr && !manager_.GoesOnAfter(ended()->saved.status());
  }

  // Waits for it. nullopt: there is none.
  std::optional<Ended> Join();

 private:
  struct InFlight {
    // What is to be written.
    checkpoint::State state;
    checkpoint::SaveOptions options;
    std::thread thread;               // none: it could not start
    std::atomic<pid_t> thread_id{0};  // once it runs with low priority
    std::atomic<bool> has_ended{false};
    Ended ended;  // once it has
  };

  absl::Status Stage(const checkpoint::State& state, checkpoint::SaveOptions options,
                     checkpoint::TensorSource* source, InFlight& save);
  absl::Status AgreeToSave(const std::string& name, const Coordinator& ranks,
                           const absl::Status& mine) const;
  void Write(const std::string& name, const absl::Status& staged, InFlight& save);

  const session::Session& session_;
  checkpoint::Manager& manager_;
  SavingRanks& ranks_;
  const bool check_staging_;
  checkpoint::Staging staging_;
  std::unique_ptr<InFlight> in_flight_;
};

}  // namespace ddp::trainer
