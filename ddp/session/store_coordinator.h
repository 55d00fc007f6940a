// A Coordinator over a c10d store. Works without a process group: before one is created, and after
// one has failed.
//
//   const StoreCoordinator ranks({.store = store, .rank = rank, .size = world_size});
//   DDP_RETURN_IF_ERROR(ranks.Agree(mine));
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::session {

struct StoreCoordinatorOptions {
  c10::intrusive_ptr<c10d::Store> store;  // for this coordinator only: use a PrefixStore
  int rank = 0;
  int size = 1;
  // Maximum wait for other ranks. Finite.
  absl::Duration timeout = absl::Minutes(30);
  // A wait is reported after this time, and again each time the time has doubled; zero: never.
  absl::Duration report_after = absl::Seconds(30);
  // Called with the report, on one of the waiting ranks. Null: print to standard error.
  std::function<void(absl::string_view line)> report = nullptr;
  // Returns the ranks whose processes are known to have ended; called again and again during a wait
  // of more than half a second. Null: not known.
  std::function<std::set<int>()> dead_ranks = nullptr;
  // Called on rank 0, while all ranks wait, with the error that is about to be returned. Null: not
  // called.
  std::function<void(const absl::Status& error)> announce = nullptr;
};

// Whether a message begins with "rank N: ". Such an error is shown as it is; others get their
// rank's number.
bool NamesItsRank(absl::string_view message);

// Whether rank 0 has announced this error already.
bool WasAnnounced(const absl::Status& status);

// Whether a Coordinator call has returned this error: no other rank waits for this one to report
// it. True for announced errors, and for those of a call that failed itself.
bool IsFromCoordinator(const absl::Status& status);

// Thread-compatible. Create one per rank and store prefix: each counts its rounds.
class StoreCoordinator final : public Coordinator {
 public:
  explicit StoreCoordinator(StoreCoordinatorOptions options) : options_(std::move(options)) {}
  StoreCoordinator(const StoreCoordinator&) = delete;
  StoreCoordinator& operator=(const StoreCoordinator&) = delete;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  // The three use the same kind of round: a rank that has failed may call Agree while others call
  // Broadcast or AllGather, which then return its error. Unavailable if the connection to the store
  // is lost, as when the rank that serves it has ended. If an awaited rank is dead
  // (options.dead_ranks), the others end the round with one error that says so, or with the error
  // of a rank that has failed, within seconds: a rank that works alone is then waited for at most
  // 10 s.
  absl::Status Agree(const absl::Status& mine) const override;
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override;
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override;

  // Agree of a rank that has failed with `mine` while the others expect no failure. Returns `mine`
  // if some of them make no Coordinator call within `patience`; they get the error when they do.
  // OK: of a rank that knows of another's failure; it then returns the error of the exchange.
  absl::Status AgreeOnFailure(const absl::Status& mine, absl::Duration patience) const;

 private:
  absl::Status Wait(const std::vector<std::string>& keys, const std::vector<int>& ranks,
                    absl::Duration timeout, std::vector<int>* found_dead = nullptr) const;
  void AnswerFor(const std::vector<int>& dead, const std::string& prefix,
                 const absl::Status& death) const;
  void Report(const std::vector<int>& missing, absl::Duration waited, absl::Duration timeout) const;
  std::vector<int> Dead(const std::vector<std::string>& keys, const std::vector<int>& ranks) const;
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& prefix,
                                                    const std::string& mine,
                                                    absl::Duration timeout) const;
  absl::Status Settle(const std::string& prefix, const absl::Status& agreed) const;
  absl::StatusOr<std::vector<std::string>> Round(const absl::StatusOr<std::string>& mine,
                                                 bool settle, absl::Duration timeout) const;

  const StoreCoordinatorOptions options_;
  mutable int64_t rounds_ = 0;  // keys of one round are never used again
};

}  // namespace ddp::session
