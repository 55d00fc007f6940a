#include "base/coordinator_testing.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/threads_testing.h"

namespace ddp {
namespace {

// State shared by the ranks' threads.
class Exchange {
 public:
  explicit Exchange(int size) : has_left_(size, false), size_(size) {}

  // Every rank's contribution to round `round`, once all are there.
  template <typename T>
  absl::StatusOr<std::vector<T>> Swap(int round, int rank, T mine,
                                      std::map<int, std::map<int, T>>& rounds) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::map<int, T>& values = rounds[round];
    values.emplace(rank, std::move(mine));
    changed_.notify_all();
    std::vector<int> gone;
    changed_.wait(lock, [&] {
      gone.clear();
      for (int peer = 0; peer < size_; ++peer) {
        if (has_left_[peer] && values.count(peer) == 0) gone.push_back(peer);
      }
      return static_cast<int>(values.size()) == size_ || !gone.empty();
    });
    if (!gone.empty()) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank, " timed out waiting for rank ", absl::StrJoin(gone, ", ")));
    }
    std::vector<T> all;
    for (const auto& [peer, value] : values) all.push_back(value);
    return all;
  }

  void Leave(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_left_[rank] = true;
    changed_.notify_all();
  }

  std::map<int, std::map<int, absl::Status>> statuses;
  std::map<int, std::map<int, std::string>> texts;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> has_left_;
  int size_;
};

class ThreadCoordinator final : public Coordinator {
 public:
  ThreadCoordinator(Exchange* exchange, int rank, int size)
      : exchange_(exchange), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::Status Agree(const absl::Status& mine) const override {
    DDP_ASSIGN_OR_RETURN(std::vector<absl::Status> all,
                         exchange_->Swap(round_++, rank_, mine, exchange_->statuses));
    for (int peer = 0; peer < size_; ++peer) {
      if (all[peer].ok()) continue;
      return size_ == 1 ? all[peer] : Annotate(all[peer], absl::StrCat("rank ", peer));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override {
    DDP_RETURN_IF_ERROR(Agree(value.status()));
    DDP_ASSIGN_OR_RETURN(std::vector<std::string> all, AllGather(*value));
    return all[0];
  }

  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    return exchange_->Swap(round_++, rank_, mine, exchange_->texts);
  }

 private:
  Exchange* exchange_;
  int rank_;
  int size_;
  mutable int round_ = 0;
};

}  // namespace

void RunCoordinatedRanks(int size, const std::function<void(const Coordinator& ranks)>& body) {
  Exchange exchange(size);
  RunThreads(size, [&](int rank) {
    body(ThreadCoordinator(&exchange, rank, size));
    exchange.Leave(rank);
  });
}

}  // namespace ddp
