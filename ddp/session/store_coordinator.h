// A Coordinator over a c10d store. Works without a process group: before one is created, and after
// one has failed.
//
//   const StoreCoordinator ranks({.store = store, .rank = rank, .size = world_size});
//   DDP_RETURN_IF_ERROR(ranks.Agree(mine));
#pragma once

#include <cstdint>
#include <functional>
#include <map>
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
  // Whether this rank waits no longer; asked again and again during a wait, which then ends with
  // Cancelled. Null: it always waits.
  std::function<bool()> gives_up = nullptr;
  // Called on rank 0, while all ranks wait, with the error that is about to be returned. Null: not
  // called.
  std::function<void(const absl::Status& error)> announce = nullptr;
  // Called when this rank begins a round and when it has ended it; rounds are numbered from 1.
  // Null: not called.
  std::function<void(int64_t round, bool begins)> on_round = nullptr;
};

// Whether a message begins with "rank N: ". Such an error is shown as it is; others get their
// rank's number.
bool NamesItsRank(absl::string_view message);

// Whether rank 0 has announced this error already.
bool WasAnnounced(const absl::Status& status);

// Whether a Coordinator call has returned this error: no other rank waits for this one to report
// it. True for announced errors, and for those of a call that failed itself.
bool IsFromCoordinator(const absl::Status& status);

// Thread-compatible. Create one per rank and store prefix: each counts its rounds. The store holds
// the keys of the last rounds only, however many there were: each rank deletes its own of a round
// once all ranks have begun a later one.
class StoreCoordinator final : public Coordinator {
 public:
  explicit StoreCoordinator(StoreCoordinatorOptions options) : options_(std::move(options)) {}
  StoreCoordinator(const StoreCoordinator&) = delete;
  StoreCoordinator& operator=(const StoreCoordinator&) = delete;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  // All use the same kind of round: a rank that has failed may call Agree while others call
  // another, which then returns its error. Unavailable if the connection to the store is lost, as
  // when the rank that serves it has ended. If an awaited rank is dead (options.dead_ranks), the
  // others end the round with one error that says so, or with the error of a rank that has failed,
  // within seconds: a rank that works alone is then waited for at most 10 s. FailedPrecondition on
  // every rank if some make another of the calls than others: then their results would be another
  // call's.
  absl::Status Agree(const absl::Status& mine) const override;
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override;
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override;
  // Other ranks than 0 read none of the bytes.
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const override;

  // Agree of a rank that makes no other call afterwards: it is not taken for another Agree.
  absl::Status AgreeAtEnd(const absl::Status& mine) const;

  // Agree of a rank that has failed with `mine` while the others expect no failure. Returns `mine`
  // if some of them make no Coordinator call within `patience`; they get the error when they do.
  // OK: of a rank that knows of another's failure; it then returns the error of the exchange.
  absl::Status AgreeOnFailure(const absl::Status& mine, absl::Duration patience) const;

 private:
  // The call of a rank in a round, as a letter.
  enum class Call : char {
    kAgree = 'a',
    kAgreeAtEnd = 'e',
    kBroadcast = 'b',
    kAllGather = 'g',
    kGather = 't',
    kAny = '*',  // the rank has failed, or knows that another has
  };
  static std::string Name(Call call);
  static absl::Status DifferentCalls(const std::map<Call, std::vector<int>>& calls);

  // Sets a key, and notes that it is this rank's to delete. Throws what Store::set throws.
  void Set(const std::string& key, absl::string_view value) const;
  void DeleteOldKeys() const;
  absl::Status StoreLost(const std::vector<int>& ranks, const absl::Status& error) const;
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
  absl::Status AgreeAs(Call call, const absl::Status& mine, absl::Duration timeout) const;
  absl::StatusOr<std::vector<std::string>> Round(const absl::StatusOr<std::string>& mine, Call call,
                                                 absl::Duration timeout) const;
  absl::StatusOr<std::vector<std::string>> RoundNumbered(int64_t number,
                                                         const absl::StatusOr<std::string>& mine,
                                                         Call call, absl::Duration timeout) const;

  const StoreCoordinatorOptions options_;
  mutable int64_t rounds_ = 0;  // keys of one round are never used again
  // Keys that this rank has set: those that a rank may still read, and those that none does.
  mutable std::vector<std::string> keys_;
  mutable std::vector<std::string> old_keys_;
};

}  // namespace ddp::session
