// Agreement between the ranks of a job: whether all of them succeeded, and on small values. Needs
// neither torch nor a process group.
//
//   absl::Status Save(const Coordinator& ranks) {
//     absl::Status mine = ranks.rank() == 0 ? WriteFile() : absl::OkStatus();
//     return ranks.Agree(mine);  // one rank's failure is every rank's result
//   }
//
// Implementations: ddp::session::Session and StoreCoordinator for a running job, SingleRank for a
// world size of 1.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp {

// The ranks of one job. All methods but rank() and size() are collective: every rank calls them, in
// the same order. Their timeout is longer than a tensor collective's, since one rank may be saving
// or loading while the others wait. Thread-compatible: one thread per rank calls them.
//
// All of them return DeadlineExceeded, naming the missing ranks, if a rank does not answer in time.
// Ranks that make different calls may get an error that says so (Session does).
class Coordinator {
 public:
  virtual ~Coordinator() = default;

  virtual int rank() const = 0;  // 0 … size()-1
  virtual int size() const = 0;  // at least 1

  // OK if `mine` is OK on every rank. Otherwise every rank gets the error of the lowest failed
  // rank, prefixed with "rank N: " if size() > 1. Only the failed rank itself is sure to get its
  // payloads.
  virtual absl::Status Agree(const absl::Status& mine) const = 0;

  // Rank 0's value on every rank. The other ranks' values are ignored. An error on any rank is the
  // result on every rank, as in Agree.
  virtual absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const = 0;

  // Every rank's bytes, in rank order, on every rank. Lengths may differ.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const = 0;

  // The same on rank 0; nothing on the others. For what is large and needed there only.
  virtual absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const {
    absl::StatusOr<std::vector<std::string>> all = AllGather(mine);
    if (all.ok() && rank() != 0) all->clear();
    return all;
  }

 protected:
  Coordinator() = default;
  Coordinator(const Coordinator&) = default;
  Coordinator& operator=(const Coordinator&) = default;
};

// The coordinator of a world size of 1: returns its arguments. Thread-safe.
class SingleRank final : public Coordinator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  absl::Status Agree(const absl::Status& mine) const override { return mine; }
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override {
    return value;
  }
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    return std::vector<std::string>{mine};
  }
};

}  // namespace ddp
