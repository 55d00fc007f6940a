// What the ranks of a job must decide together: whether all of them succeeded, and which value they
// go on with. Free of torch and of any process group.
//
//   absl::Status Save(const Coordinator& ranks) {
//     absl::Status mine = ranks.rank() == 0 ? WriteFile() : absl::OkStatus();
//     return ranks.Agree(mine);  // one rank's failure is every rank's result
//   }
//
// ddp/session implements it for a running job; SingleRank serves a world of one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp {

// The ranks of one job. All methods but rank() and size() are collective: every rank calls them, in
// the same order. They wait for ranks that work alone (save, load), so their timeout is longer than
// a collective's. Thread-compatible: one thread per rank calls them.
class Coordinator {
 public:
  virtual ~Coordinator() = default;

  virtual int rank() const = 0;  // 0 … size()-1
  virtual int size() const = 0;  // at least 1

  // OK if every rank's `mine` is; otherwise, on every rank, the error of the lowest rank that
  // failed, with "rank N: " in front where size() > 1. Payloads of `mine` are kept.
  // DeadlineExceeded names the ranks that have not answered.
  virtual absl::Status Agree(const absl::Status& mine) const = 0;

  // Rank 0's value on every rank; rank 0's error on every rank. The `value` of other ranks is
  // ignored unless it is an error, which then is the result everywhere, as in Agree.
  virtual absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const = 0;

  // Every rank's bytes, in rank order, on every rank. Lengths may differ.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const = 0;

 protected:
  Coordinator() = default;
  Coordinator(const Coordinator&) = default;
  Coordinator& operator=(const Coordinator&) = default;
};

// The coordinator of a world of one: everything is agreed on at once. Thread-safe.
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
