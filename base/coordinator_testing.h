// For tests: ranks as threads of one process, each with a Coordinator.
//
//   RunCoordinatedRanks(3, [](const Coordinator& ranks) {
//     const absl::Status mine = ranks.rank() == 1 ? absl::DataLossError("x") : absl::OkStatus();
//     EXPECT_FALSE(ranks.Agree(mine).ok());
//   });
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/coordinator.h"

namespace ddp {

// Runs `body` in `size` concurrent threads and joins them. Ranks that wait for a rank whose body
// has returned get DeadlineExceeded at once.
void RunCoordinatedRanks(int size, const std::function<void(const Coordinator& ranks)>& body);

// Counts the collective calls of another one, which outlives it.
class CountingCoordinator final : public Coordinator {
 public:
  explicit CountingCoordinator(const Coordinator& ranks) : ranks_(ranks) {}
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  absl::Status Agree(const absl::Status& mine) const override {
    ++calls_;
    return ranks_.Agree(mine);
  }
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override {
    ++calls_;
    return ranks_.Broadcast(value);
  }
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    ++calls_;
    return ranks_.AllGather(mine);
  }
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) const override {
    ++calls_;
    gathered_ += mine.size();
    return ranks_.Gather(mine);
  }
  int calls() const { return calls_; }
  size_t gathered() const { return gathered_; }  // bytes of this rank

 private:
  const Coordinator& ranks_;
  mutable int calls_ = 0;
  mutable size_t gathered_ = 0;
};

}  // namespace ddp
