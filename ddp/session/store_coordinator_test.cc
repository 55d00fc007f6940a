#include "ddp/session/store_coordinator.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/option_error.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::session {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr Serve() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

StorePtr Connect(const StorePtr& server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<c10d::TCPStore&>(*server).getPort();
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Lines and announcements of all ranks.
struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> reports, announcements;

  void Add(std::vector<std::string>& list, const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    list.push_back(line);
    changed.notify_all();
  }
  void WaitForReports(size_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reports.size() >= number; });
  }
};

struct Limits {
  absl::Duration timeout = absl::Seconds(60);
  absl::Duration report_after = absl::ZeroDuration();
  std::function<std::set<int>()> dead_ranks = nullptr;
};

// Ranks as threads, over the sockets of a real store.
void RunRanks(int size, const Limits& limits, Heard& heard,
              const std::function<void(const StoreCoordinator& ranks)>& body) {
  const StorePtr server = Serve();
  RunThreads(size, [&](int rank) {
    body(StoreCoordinator({
        .store = Connect(server),
        .rank = rank,
        .size = size,
        .timeout = limits.timeout,
        .report_after = limits.report_after,
        .report =
            [&, rank](absl::string_view line) {
              heard.Add(heard.reports, absl::StrCat(rank, ": ", line));
            },
        .dead_ranks = limits.dead_ranks,
        .announce =
            [&, rank](const absl::Status& error) {
              heard.Add(heard.announcements, absl::StrCat(rank, ": ", error.message()));
            },
    }));
  });
}

TEST(StoreCoordinatorTest, TheLowestFailingRanksErrorIsAnnouncedOnceAndEverybodys) {
  Heard heard;
  RunRanks(4, {}, heard, [](const StoreCoordinator& ranks) {
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    const absl::Status mine = ranks.rank() >= 2
                                  ? absl::NotFoundError(absl::StrCat("no file ", ranks.rank()))
                                  : absl::OkStatus();
    const absl::Status agreed = ranks.Agree(mine);
    EXPECT_EQ(agreed.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(agreed.message(), "rank 2: no file 2");
    EXPECT_TRUE(WasAnnounced(agreed));
    EXPECT_FALSE(WasAnnounced(mine));
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
  });
  EXPECT_EQ(heard.announcements, (std::vector<std::string>{"0: rank 2: no file 2"}));
}

// So that a program can name the option as its user wrote it.
TEST(StoreCoordinatorTest, TheOptionOfAnErrorTravels) {
  Heard heard;
  RunRanks(3, {}, heard, [](const StoreCoordinator& ranks) {
    const absl::Status mine = ranks.rank() == 1
                                  ? OptionError("optimizer.lr", "-1", "must be at least 0")
                                  : absl::OkStatus();
    const absl::Status agreed = ranks.Agree(mine);
    EXPECT_EQ(agreed.message(), "rank 1: optimizer.lr=-1 must be at least 0");
    const std::optional<OptionProblem> problem = ProblemOf(agreed);
    ASSERT_TRUE(problem.has_value());
    EXPECT_EQ(problem->path, "optimizer.lr");
    EXPECT_EQ(problem->value, "-1");
    EXPECT_EQ(problem->problem, "must be at least 0");
  });
}

// Nobody waits for a dead rank, also in Broadcast, where only rank 0 sends. Rank 3 is dead only
// after its part of the round.
TEST(StoreCoordinatorTest, ADeadRankIsOneErrorOfAllOthers) {
  Heard heard;
  const Limits limits = {.timeout = absl::Hours(1), .dead_ranks = [] {
                           return std::set<int>{1, 3};
                         }};
  RunRanks(4, limits, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 1) return;
    absl::Status status;
    if (ranks.rank() == 0) status = ranks.Agree(absl::OkStatus());
    if (ranks.rank() == 2) status = ranks.Broadcast("").status();
    if (ranks.rank() == 3) status = ranks.AllGather("").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), ": Connection closed by peer: rank 1 has died"))
        << status;
    EXPECT_TRUE(WasAnnounced(status));
  });
  EXPECT_EQ(heard.announcements.size(), 1);
}

// It may be why the other has died.
TEST(StoreCoordinatorTest, ARanksOwnErrorCountsMoreThanThatAnotherHasDied) {
  Heard heard;
  const Limits limits = {.timeout = absl::Hours(1), .dead_ranks = [] { return std::set<int>{0}; }};
  RunRanks(3, limits, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 0) return;
    const absl::Status status =
        ranks.Agree(ranks.rank() == 2 ? absl::DataLossError("damaged") : absl::OkStatus());
    EXPECT_EQ(status.message(), "rank 2: damaged");
    EXPECT_FALSE(WasAnnounced(status)) << "rank 0 would have";
  });
}

// A checkpoint that another rank writes for an hour does not keep the job.
TEST(StoreCoordinatorTest, ARankThatWorksAloneIsWaitedForBrieflyOnceAnotherHasDied) {
  Heard heard;
  absl::Notification left;
  const Limits limits = {.timeout = absl::Hours(1), .dead_ranks = [] { return std::set<int>{2}; }};
  RunRanks(3, limits, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 2) return;
    if (ranks.rank() == 0) left.WaitForNotification();
    const absl::Status status = ranks.Agree(absl::OkStatus());
    if (ranks.rank() == 1) left.Notify();
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 2 has died")) << status;
    EXPECT_EQ(WasAnnounced(status), ranks.rank() == 0);
  });
}

// A process may end as soon as it has set its key, which another rank may be told only later.
TEST(StoreCoordinatorTest, ARankThatDiesAfterItsPartIsNotMissed) {
  Heard heard;
  absl::Notification is_dead;
  std::atomic<bool> told = false;
  const Limits limits = {.timeout = absl::Hours(1), .dead_ranks = [&] {
                           if (!told.exchange(true)) {
                             is_dead.Notify();
                             absl::SleepFor(absl::Seconds(2));  // rank 1 sets its key
                           }
                           return std::set<int>{1};
                         }};
  RunRanks(2, limits, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 1) is_dead.WaitForNotification();
    EXPECT_TRUE(ranks.AllGather("").ok());
  });
}

// A failed rank ends without the others if they do not answer; they get its error later, and do not
// wait for it.
TEST(StoreCoordinatorTest, AFailedRankLeavesItsErrorToRanksThatAreLate) {
  Heard heard;
  absl::Notification left;
  RunRanks(3, {.timeout = absl::Hours(1)}, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 1) {
      const absl::Status result =
          ranks.AgreeOnFailure(absl::DataLossError("damaged"), absl::Milliseconds(50));
      EXPECT_EQ(result.message(), "damaged");
      EXPECT_FALSE(WasAnnounced(result));
      EXPECT_TRUE(IsFromCoordinator(result));
      left.Notify();
      return;
    }
    left.WaitForNotification();
    EXPECT_EQ(ranks.Agree(absl::OkStatus()).message(), "rank 1: damaged");
  });
}

TEST(StoreCoordinatorTest, ValuesOfAnyBytesTravel) {
  Heard heard;
  RunRanks(3, {}, heard, [](const StoreCoordinator& ranks) {
    const std::string mine(ranks.rank(), '\0');
    EXPECT_EQ(*ranks.AllGather(mine),
              (std::vector<std::string>{"", std::string(1, '\0'), std::string(2, '\0')}));
    EXPECT_EQ(*ranks.Broadcast(absl::StrCat("from ", ranks.rank())), "from 0");
    const absl::StatusOr<std::string> failed = ranks.Broadcast(
        ranks.rank() == 0 ? absl::StatusOr<std::string>(absl::DataLossError("damaged"))
                          : absl::StatusOr<std::string>("ignored"));
    EXPECT_EQ(failed.status().message(), "rank 0: damaged");
  });
}

// Counts the bytes that a rank reads of others.
class CountingStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    std::vector<std::vector<uint8_t>> values = PrefixStore::multiGet(keys);
    for (const auto& value : values) bytes += value.size();
    return values;
  }
  size_t bytes = 0;
};

TEST(StoreCoordinatorTest, OnlyRank0ReadsWhatIsGathered) {
  const StorePtr server = Serve();
  const std::string large(10'000, '\0');
  RunThreads(3, [&](int rank) {
    const auto store = c10::make_intrusive<CountingStore>("test", Connect(server));
    const StoreCoordinator ranks({.store = store, .rank = rank, .size = 3});
    for (int i = 0; i < 3; ++i) {
      const auto gathered = ranks.Gather(absl::StrCat(rank, large, i));
      ASSERT_TRUE(gathered.ok()) << gathered.status();
      std::vector<std::string> expected;
      for (int peer = 0; rank == 0 && peer < 3; ++peer) {
        expected.push_back(absl::StrCat(peer, large, i));
      }
      EXPECT_EQ(*gathered, expected);
    }
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    EXPECT_TRUE(rank == 0 || store->bytes < large.size()) << store->bytes;
  });
}

TEST(StoreCoordinatorTest, ARankThatFailsMeetsTheOthersInWhateverTheyCall) {
  Heard heard;
  RunRanks(3, {}, heard, [](const StoreCoordinator& ranks) {
    const absl::Status failed = absl::DataLossError("damaged");
    absl::Status result;
    if (ranks.rank() == 0) result = ranks.Broadcast(std::string("value")).status();
    if (ranks.rank() == 1) result = ranks.Agree(failed);
    if (ranks.rank() == 2) result = ranks.AllGather("bytes").status();
    EXPECT_EQ(result.code(), absl::StatusCode::kDataLoss) << result;
    EXPECT_EQ(result.message(), "rank 1: damaged");
    EXPECT_TRUE(WasAnnounced(result));
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());  // they are in step again
  });
  EXPECT_EQ(heard.announcements, (std::vector<std::string>{"0: rank 1: damaged"}));
}

// What a store holds, its values in bytes.
struct Contents {
  size_t keys = 0;
  size_t bytes = 0;
  bool operator==(const Contents&) const = default;
};
Contents ContentsOf(const StorePtr& store) {
  Contents contents;
  for (const std::string& key : store->listKeys()) {
    ++contents.keys;
    contents.bytes += store->get(key).size();
  }
  return contents;
}

// Some ranks' coordinators, for one program after another. No rank runs between two of them.
class LastingRanks {
 public:
  LastingRanks(int size, const Limits& limits) : server_(Serve()) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<StoreCoordinator>(
          StoreCoordinatorOptions{.store = Connect(server_),
                                  .rank = rank,
                                  .size = size,
                                  .timeout = limits.timeout,
                                  .report_after = absl::ZeroDuration(),
                                  .dead_ranks = limits.dead_ranks}));
    }
  }
  Contents After(const std::function<void(const StoreCoordinator& ranks)>& body) {
    RunThreads(static_cast<int>(ranks_.size()), [&](int rank) { body(*ranks_[rank]); });
    return ContentsOf(server_);
  }

 private:
  const StorePtr server_;
  std::vector<std::unique_ptr<StoreCoordinator>> ranks_;
};

// A run of a month must not fill the memory of rank 0.
TEST(StoreCoordinatorTest, TheStoreHoldsTheKeysOfTheLastRoundsOnly) {
  LastingRanks ranks(3, {});
  const std::string large(10'000, 'x');
  const auto save = [&](const StoreCoordinator& rank) {  // and more than a save
    EXPECT_EQ(*rank.Broadcast(large), large);
    EXPECT_TRUE(rank.Agree(absl::OkStatus()).ok());
    EXPECT_EQ(rank.AllGather(large)->size(), 3);
    EXPECT_EQ(rank.Gather(large)->size(), rank.rank() == 0 ? 3 : 0);
    const absl::Status failed = absl::DataLossError("damaged");
    EXPECT_FALSE(rank.Agree(rank.rank() == 1 ? failed : absl::OkStatus()).ok());
  };
  const auto saves = [&](int number) {
    return ranks.After([&](const StoreCoordinator& rank) {
      for (int i = 0; i < number; ++i) save(rank);
    });
  };
  const Contents after_10 = saves(10);
  EXPECT_LT(after_10.keys, 3 * (5 * 3 + 2));
  EXPECT_EQ(saves(990), after_10);
}

// The rank that is late finds the round that the others have given up.
TEST(StoreCoordinatorTest, RoundsThatWereGivenUpAreDeletedLater) {
  LastingRanks ranks(3, {.timeout = absl::Seconds(3)});
  const auto agree = [](const StoreCoordinator& rank) {
    EXPECT_TRUE(rank.Agree(absl::OkStatus()).ok());
  };
  ranks.After(agree);
  const Contents before = ranks.After(agree);
  std::latch given_up(2);
  ranks.After([&](const StoreCoordinator& rank) {
    if (rank.rank() == 2) {
      given_up.wait();
      EXPECT_TRUE(rank.AllGather("late").ok());
    } else {
      EXPECT_EQ(rank.AllGather("").status().code(), absl::StatusCode::kDeadlineExceeded);
      given_up.count_down();
    }
  });
  ranks.After(agree);
  EXPECT_EQ(ranks.After(agree), before);
}

// Others set its keys.
TEST(StoreCoordinatorTest, KeysOfADeadRankAreDeletedToo) {
  LastingRanks ranks(3, {.timeout = absl::Hours(1), .dead_ranks = [] { return std::set<int>{2}; }});
  const auto agree = [](const StoreCoordinator& rank) {
    if (rank.rank() == 2) return;
    EXPECT_FALSE(rank.Agree(absl::OkStatus()).ok());
  };
  ranks.After(agree);
  ranks.After(agree);
  const Contents before = ranks.After(agree);
  EXPECT_EQ(ranks.After(agree), before);
}

// Such as where rank 0 alone saves a checkpoint, and another calls the next thing, or nothing.
TEST(StoreCoordinatorTest, DifferentCallsAreAnErrorOfAllRanks) {
  Heard heard;
  RunRanks(3, {.timeout = absl::Hours(1)}, heard, [](const StoreCoordinator& ranks) {
    for (int odd = 0; odd < 3; ++odd) {
      const bool is_odd = ranks.rank() == odd;
      const absl::Status status =
          is_odd ? ranks.Broadcast(std::string("folder")).status() : ranks.Agree(absl::OkStatus());
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(
          absl::StrContains(status.message(), absl::StrCat("rank ", odd, " makes Broadcast")))
          << status;
      EXPECT_TRUE(WasAnnounced(status));
      const absl::Status at_end =
          is_odd ? ranks.AgreeAtEnd(absl::OkStatus()) : ranks.AllGather("").status();
      EXPECT_TRUE(absl::StrContains(at_end.message(),
                                    absl::StrCat("rank ", odd, " makes no call any more")))
          << at_end;
    }
    EXPECT_TRUE(ranks.AgreeAtEnd(absl::OkStatus()).ok());
  });
  EXPECT_EQ(heard.announcements.size(), 6);
}

TEST(NamesItsRankTest, OnlyAPrefixWithANumber) {
  EXPECT_TRUE(NamesItsRank("rank 12: damaged"));
  for (const char* other :
       {"", "rank ", "rank : x", "rank 1", "rank 1 x", "rank deficient: x", "the rank 1: x"}) {
    EXPECT_FALSE(NamesItsRank(other)) << other;
  }
}

// Ranks wait for a rank that works alone, and one of them reports it.
TEST(StoreCoordinatorTest, AWaitIsReportedByTheLowestRankThatWaits) {
  Heard heard;
  RunRanks(3, {.report_after = absl::Seconds(2)}, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 0) heard.WaitForReports(1);  // what it works at takes that long
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
  });
  ASSERT_FALSE(heard.reports.empty());
  for (const std::string& line : heard.reports) {
    EXPECT_TRUE(absl::StartsWith(line, "1: waiting for rank 0 since ")) << line;
    EXPECT_TRUE(absl::StrContains(line, "work_timeout_s=60")) << line;
  }
}

TEST(StoreCoordinatorTest, AWaitIsReportedAgainWheneverItsTimeHasDoubled) {
  constexpr absl::Duration kFirst = absl::Milliseconds(100);
  constexpr size_t kReports = 4;
  Heard heard;
  RunRanks(2, {.report_after = kFirst}, heard, [&](const StoreCoordinator& ranks) {
    if (ranks.rank() == 0) heard.WaitForReports(kReports);
    EXPECT_TRUE(ranks.Agree(absl::OkStatus()).ok());
  });
  ASSERT_GE(heard.reports.size(), kReports);
  for (size_t i = 0; i < kReports; ++i) {
    // "1: waiting for rank 0 since 800ms to load …"
    const std::vector<std::string> words = absl::StrSplit(heard.reports[i], ' ');
    ASSERT_GT(words.size(), 6) << heard.reports[i];
    absl::Duration since;
    ASSERT_TRUE(absl::ParseDuration(words[6], &since)) << heard.reports[i];
    EXPECT_GE(since, kFirst * (1 << i)) << heard.reports[i];
  }
}

TEST(StoreCoordinatorTest, ARankThatNeverComesIsNamed) {
  Heard heard;
  RunRanks(3, {.timeout = absl::Seconds(3)}, heard, [](const StoreCoordinator& ranks) {
    if (ranks.rank() == 1) return;
    const absl::Status status = ranks.Agree(absl::OkStatus());
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(absl::StrContains(status.message(), "Timed out after 3s of waiting for rank 1 "))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "work_timeout_s")) << status;
    // Its own error says more.
    EXPECT_EQ(ranks.Agree(absl::DataLossError("mine")).message(), "mine");
  });
}

TEST(StoreCoordinatorTest, ARankThatGivesUpWaitsNoLonger) {
  const StorePtr server = Serve();
  const StoreCoordinator ranks({.store = Connect(server),
                                .rank = 1,
                                .size = 3,
                                .timeout = absl::Minutes(30),
                                .report_after = absl::ZeroDuration(),
                                .gives_up = [asked = 0]() mutable { return ++asked == 3; }});
  const absl::Status status = ranks.Agree(absl::OkStatus());
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has given up waiting for")) << status;
}

TEST(StoreCoordinatorTest, TheEndOfTheStoreIsNoticedBeforeTheTimeout) {
  StorePtr server = Serve();
  const StoreCoordinator ranks({.store = Connect(server),
                                .rank = 1,
                                .size = 2,
                                .timeout = absl::Minutes(30),
                                .report_after = absl::ZeroDuration()});
  ASSERT_EQ(server.use_count(), 1);
  std::thread end([&] { server.reset(); });
  const absl::Status status = ranks.Agree(absl::OkStatus());
  end.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST(StoreCoordinatorTest, AWorldOfOneNeedsNoStore) {
  const StoreCoordinator alone({.store = nullptr});
  EXPECT_TRUE(alone.Agree(absl::OkStatus()).ok());
  EXPECT_EQ(alone.Agree(absl::DataLossError("x")).message(), "x");
  EXPECT_EQ(*alone.Broadcast(std::string("a")), "a");
  EXPECT_EQ(*alone.AllGather("b"), std::vector<std::string>{"b"});
}

}  // namespace
}  // namespace ddp::session
