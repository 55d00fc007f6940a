#include "backends/shm/shm_group.h"

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

constexpr Limits kSmall = {.segment_bytes = 2 << 20};
constexpr Limits kLarge = {.segment_bytes = 16 << 20};

// The key-value store of a group.
class Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return values_.count(key) != 0; });
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;  // guarded by mutex_
};

// What two ranks, which are threads, get from Join. `edit` may change the options of each.
std::vector<absl::Status> JoinAll(const std::function<void(ShmJoinOptions&)>& edit) {
  Store store;
  std::vector<absl::StatusOr<std::shared_ptr<ShmGroup>>> groups(2,
                                                                absl::UnknownError("not joined"));
  RunThreads(2, [&](int rank) {
    ShmJoinOptions options = {.rank = rank,
                              .world_size = 2,
                              .limits = kSmall,
                              .deadline = absl::Now() + absl::Seconds(60)};
    options.set = [&](const std::string& key, const std::string& value) {
      return store.Set(key, value);
    };
    options.get = [&](const std::string& key) { return store.Get(key); };
    edit(options);
    groups[rank] = ShmGroup::Join(options);
  });
  for (const auto& group : groups) {
    if (group.ok()) (*group)->Leave();
  }
  return {groups[0].status(), groups[1].status()};
}

TEST(ShmGroupTest, RanksWithTheSameLimitsJoin) {
  for (const absl::Status& status : JoinAll([](ShmJoinOptions&) {})) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Each plans the segment by itself.
TEST(ShmGroupTest, RanksWithDifferentLimitsAreRefused) {
  for (const auto& [first, second] : {std::pair(kLarge, kSmall), std::pair(kSmall, kLarge)}) {
    const auto statuses = JoinAll(
        [&](ShmJoinOptions& options) { options.limits = options.rank == 0 ? first : second; });
    EXPECT_EQ(statuses[1].code(), absl::StatusCode::kFailedPrecondition) << statuses[1];
    EXPECT_TRUE(absl::StrContains(statuses[1].message(), "rank 1 and rank 0 have different plans"))
        << statuses[1];
  }
}

TEST(ShmGroupTest, RanksOnTwoHostsAreRefused) {
  const auto statuses = JoinAll([](ShmJoinOptions& options) {
    options.get = [get = options.get,
                   rank = options.rank](const std::string& key) -> absl::StatusOr<std::string> {
      absl::StatusOr<std::string> value = get(key);
      const bool elsewhere = value.ok() && key == absl::StrCat("rank/", 1 - rank);
      return elsewhere ? absl::StrCat("another-", *value) : value;
    };
  });
  for (int rank : {0, 1}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kFailedPrecondition) << statuses[rank];
    EXPECT_TRUE(absl::StrContains(statuses[rank].message(),
                                  absl::StrCat("from rank ", rank, " rank ", 1 - rank, " ")))
        << statuses[rank];
  }
}

TEST(ShmGroupTest, WithoutRankZerosSegmentTheOthersFailWithItsReason) {
  const auto statuses = JoinAll([](ShmJoinOptions& options) {
    if (options.rank != 0) return;
    // The first time, it is where the segment is to be had; the second time, why it is not.
    options.set = [set = options.set, tries = 0](const std::string& key,
                                                 const std::string& value) mutable {
      if (key == "segment" && tries++ == 0) return absl::ResourceExhaustedError("no memory left");
      return set(key, value);
    };
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kResourceExhausted) << statuses[0];
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kFailedPrecondition) << statuses[1];
  EXPECT_TRUE(absl::StrContains(statuses[1].message(), "rank 0 made no segment: no memory left"))
      << statuses[1];
}

}  // namespace
}  // namespace ddp::backends::shm
