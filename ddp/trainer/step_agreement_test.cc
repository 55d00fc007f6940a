#include "ddp/trainer/step_agreement.h"

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/threads_testing.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::trainer {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A server, and a connection of its own for every rank.
std::vector<StorePtr> Connections(int world_size) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<StorePtr> stores = {server};
  options.isServer = false;
  options.port = server->getPort();
  for (int rank = 1; rank < world_size; ++rank) {
    stores.push_back(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  }
  return stores;
}

// Takes steps 1, 2, … as each rank until they end; the ranks meet in each step, as they do in the
// all-reduce of gradients. Returns each rank's last step.
std::vector<int64_t> RunUntilStop(int world_size, int64_t most,
                                  const std::function<bool(int rank, int64_t step)>& requests) {
  const std::vector<StorePtr> stores = Connections(world_size);
  std::vector<int64_t> last(world_size);
  std::barrier meet(world_size);
  RunThreads(world_size, [&](int rank) {
    StepAgreement stop(stores[rank], rank, world_size, /*first_step=*/1);
    int64_t step = 1;
    while (true) {
      meet.arrive_and_wait();
      last[rank] = step;
      if (requests(rank, step)) stop.Request();
      if (step == most) break;
      auto more = stop.Enter(step + 1);
      EXPECT_TRUE(more.ok()) << more.status();
      if (!more.ok() || !*more) break;
      ++step;
    }
    meet.arrive_and_wait();  // the last collective of a run
    stop.Close();
  });
  return last;
}

TEST(StepAgreementTest, OneRanksRequestEndsAllWithinAStep) {
  for (int world_size : {1, 2, 5}) {
    for (int asking = 0; asking < world_size; ++asking) {
      const auto last = RunUntilStop(
          world_size, 1000, [&](int rank, int64_t step) { return rank == asking && step == 7; });
      for (int64_t step : last) EXPECT_EQ(step, last[0]);
      EXPECT_GE(last[0], 7);
      EXPECT_LE(last[0], world_size == 1 ? 7 : 8);
    }
  }
}

TEST(StepAgreementTest, ARequestOfAllEndsTheirStep) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto last = RunUntilStop(3, 1000, [](int, int64_t step) { return step == 4; });
    EXPECT_EQ(last, (std::vector<int64_t>{4, 4, 4}));
  }
}

TEST(StepAgreementTest, AllRanksHaveTheNoteOfTheRequestThatCameFirst) {
  for (const int asking : {0, 1, 3}) {  // 3: all
    const std::vector<StorePtr> stores = Connections(3);
    std::vector<std::string> notes(3);
    std::barrier meet(3);
    RunThreads(3, [&](int rank) {
      StepAgreement stop(stores[rank], rank, 3, /*first_step=*/1);
      if (asking == rank || asking == 3) stop.Request("by " + std::to_string(rank));
      for (int64_t step = 2; stop.Enter(step).value(); ++step) meet.arrive_and_wait();
      EXPECT_TRUE(stop.is_requested());
      notes[rank] = stop.note();
      meet.arrive_and_wait();
      stop.Close();
    });
    EXPECT_EQ(notes[1], notes[0]);
    EXPECT_EQ(notes[2], notes[0]);
    EXPECT_EQ(notes[0].substr(0, 3), "by ");
    if (asking < 3) {
      EXPECT_EQ(notes[0], "by " + std::to_string(asking));
    }
  }
}

TEST(StepAgreementTest, WithoutARequestItEndsWithTheRun) {
  const auto last = RunUntilStop(3, 50, [](int, int64_t) { return false; });
  EXPECT_EQ(last, (std::vector<int64_t>{50, 50, 50}));
}

TEST(StepAgreementTest, ARequestInTheLastStepChangesNothing) {
  const auto last =
      RunUntilStop(3, 5, [](int rank, int64_t step) { return rank == 1 && step == 5; });
  EXPECT_EQ(last, (std::vector<int64_t>{5, 5, 5}));
}

// Waits of a rank's thread that have timed out.
struct Timeouts {
  void Add() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++count;
    changed.notify_all();
  }
  // False if there are not so many after half a minute.
  bool Reach(int number) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), [&] { return count >= number; });
  }

  std::mutex mutex;
  std::condition_variable changed;
  int count = 0;  // guarded by mutex
};

constexpr char kRun[] = "run";

class CountingStore : public c10d::PrefixStore {
 public:
  CountingStore(StorePtr store, std::shared_ptr<Timeouts> timeouts)
      : PrefixStore(kRun, std::move(store)), timeouts_(std::move(timeouts)) {}

  StorePtr clone() override {
    return c10::make_intrusive<CountingStore>(store_->clone(), timeouts_);
  }

  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    try {
      PrefixStore::wait(keys, timeout);
    } catch (...) {
      timeouts_->Add();
      throw;
    }
  }

 private:
  const std::shared_ptr<Timeouts> timeouts_;
};

// Each rank's common steps, of many requests.
std::vector<std::vector<int64_t>> RunWithSaves(
    int world_size, int64_t most, const std::function<bool(int rank, int64_t step)>& requests,
    const std::vector<StorePtr>& stores) {
  std::vector<std::vector<int64_t>> common(world_size);
  std::barrier meet(world_size);
  RunThreads(world_size, [&](int rank) {
    StepAgreement save(stores[rank], rank, world_size, /*first_step=*/1);
    for (int64_t step = 1; step <= most; ++step) {
      meet.arrive_and_wait();
      if (requests(rank, step)) save.Request();
      auto more = save.Enter(step + 1);
      EXPECT_TRUE(more.ok()) << more.status();
      if (more.ok() && *more) continue;
      common[rank].push_back(step);
      save.Renew(step + 1);
    }
    meet.arrive_and_wait();
    save.Close();
  });
  return common;
}

TEST(StepAgreementTest, RequestsAreMetAgainAndAgain) {
  for (const int world_size : {1, 2, 5}) {
    const auto common = RunWithSaves(
        world_size, 205,
        [&](int rank, int64_t step) { return step % 10 == 0 && rank == step / 10 % world_size; },
        Connections(world_size));
    for (const auto& steps : common) EXPECT_EQ(steps, common[0]);
    ASSERT_EQ(common[0].size(), 20);
    for (size_t i = 0; i < 20; ++i) {
      const auto asked = static_cast<int64_t>(10 * (i + 1));
      EXPECT_GE(common[0][i], asked);
      EXPECT_LE(common[0][i], asked + 1);
    }
  }
}

// Each rank asks at the first step at which it may, so that requests meet ranks that have not begun
// the round. The keys of two rounds at most are left.
TEST(StepAgreementTest, RanksThatAskAtOnceLeaveFewKeys) {
  const std::vector<StorePtr> stores = Connections(4);
  const auto common = RunWithSaves(
      4, 100, [](int, int64_t) { return true; }, stores);
  ASSERT_EQ(common[0].size(), 100);
  for (const auto& steps : common) EXPECT_EQ(steps, common[0]);
  EXPECT_LE(stores[0]->getNumKeys(), 2 * (4 + 2) + 1);
}

TEST(StepAgreementTest, ARequestIsNoticedAfterWaitsThatTimedOut) {
  const std::vector<StorePtr> stores = Connections(2);
  const auto timeouts = std::make_shared<Timeouts>();
  StepAgreement asking(c10::make_intrusive<c10d::PrefixStore>(kRun, stores[0]), 0, 2, 1);
  StepAgreement waiting(c10::make_intrusive<CountingStore>(stores[1], timeouts), 1, 2, 1,
                        std::chrono::milliseconds(50));
  ASSERT_TRUE(timeouts->Reach(3));
  asking.Request();
  for (StepAgreement* stop : {&asking, &waiting}) {
    const auto more = stop->Enter(2);
    ASSERT_TRUE(more.ok()) << more.status();
    EXPECT_FALSE(*more);
  }
  asking.Close();
  waiting.Close();
}

TEST(StepAgreementTest, OneThatIsNotClosedHoldsNobodyUp) {
  const std::vector<StorePtr> stores = Connections(2);
  StepAgreement left(stores[0], 0, 2, 1);
  { StepAgreement failed(stores[1], 1, 2, 1); }
  left.Close();
}

// The store may end with rank 0: then no thread of another rank waits for it.
TEST(StepAgreementTest, RankZeroThatIsNotClosedEndsTheOthersThreads) {
  const std::vector<StorePtr> stores = Connections(2);
  StepAgreement left(stores[1], 1, 2, 1);
  { StepAgreement failed(stores[0], 0, 2, 1); }
  left.Request();
  EXPECT_FALSE(left.is_requested());
  left.Close();
}

}  // namespace
}  // namespace ddp::trainer
