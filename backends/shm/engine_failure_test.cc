#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "backends/shm/engine.h"
#include "backends/shm/ranks_as_threads.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

TEST(EngineFailureTest, DifferentCallsAreAnErrorThatShowsBoth) {
  std::vector<std::string> messages(2);
  RunRanks(2, [&](Rank& self) {
    for (size_t count : {size_t{10}, size_t{100'000}}) {
      std::vector<float> tensor(count);
      Request request = shm::AllReduce(Data(tensor), count);
      if (self.rank() == 1) {
        request.kind = Kind::kBroadcast;
        request.count = 40;
      }
      const absl::Status status = self.Run(std::move(request));
      messages[self.rank()] = std::string(status.message());
      EXPECT_FALSE(status.ok());
      break;
    }
  });
  for (const std::string& message : messages) {
    EXPECT_TRUE(absl::StrContains(message, "allreduce(SUM) of 10 x float")) << message;
    EXPECT_TRUE(absl::StrContains(message, "broadcast(root 0) of 40 bytes")) << message;
  }
}

TEST(EngineFailureTest, OneSlowOneLongIsAnErrorNotAHang) {
  RunRanks(2, [&](Rank& self) {
    std::vector<float> tensor(self.rank() == 0 ? 10 : 1'000'000);
    const absl::Status status = self.Run(shm::AllReduce(Data(tensor), tensor.size()));
    EXPECT_TRUE(absl::StrContains(status.message(), "10 x float")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "1000000 x float")) << status;
  });
}

TEST(EngineFailureTest, AMissingRankIsNamedAtTheDeadline) {
  std::atomic<bool> over = false;
  RunRanks(3, [&](Rank& self) {
    if (self.rank() == 1) {
      while (!over) std::this_thread::yield();
      return;
    }
    std::vector<float> tensor(10);
    const absl::Status status = self.Run(shm::AllReduce(Data(tensor), tensor.size()), kSecond / 5);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(absl::StrContains(status.message(), "not called by rank 1")) << status;
    // And so for ever.
    EXPECT_FALSE(self.Run(Request()).ok());
    over = true;
  });
}

TEST(EngineFailureTest, ADeadRankIsNamedByAll) {
  Segment segment(3, {});
  std::atomic<bool> alive = true;
  std::vector<PeerInfo> peers = NamedPeers(3);
  peers[2].alive = [&alive] { return alive.load(); };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Rank self(segment, rank, peers);
      std::vector<float> tensor(100'000);
      const absl::Status status = self.Run(shm::AllReduce(Data(tensor), tensor.size()));
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_TRUE(absl::StrContains(status.message(), "rank 2 has died")) << status;
    });
  }
  alive = false;
  for (std::thread& thread : threads) thread.join();
}

TEST(EngineFailureTest, LeavingEndsThoseThatWaitForTheRank) {
  RunRanks(2, [&](Rank& self) {
    std::vector<float> tensor(10);
    ASSERT_EQ(self.Run(shm::AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
    if (self.rank() == 1) return self.Leave();
    const absl::Status status = self.Run(Request());
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has left the group")) << status;
  });
}

TEST(EngineFailureTest, LeavingWithWorkUnderWayCancelsIt) {
  RunRanks(2, [&](Rank& self) {
    if (self.rank() == 1) return;
    std::vector<float> tensor(1'000'000);
    Op op;
    op.requests.push_back(shm::AllReduce(Data(tensor), tensor.size()));
    op.timeout_ns = 60 * kSecond;
    self.engine().Submit(&op);
    self.Leave();
    EXPECT_TRUE(op.done());
    EXPECT_FALSE(op.status().ok());
  });
}

TEST(EngineFailureTest, AbortReachesAThreadThatWaitsAndThePeers) {
  std::atomic<bool> waiting = false;
  RunRanks(2, [&](Rank& self) {
    std::vector<float> tensor(10);
    if (self.rank() == 1) {
      while (!waiting) std::this_thread::yield();
      self.engine().Abort(absl::AbortedError("rank 1 aborted the group"));
      EXPECT_FALSE(self.Run(Request()).ok());
      return;
    }
    waiting = true;
    const absl::Status status = self.Run(Request());
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 aborted")) << status;
  });
}

TEST(EngineFailureTest, WaitWithItsOwnTimeLimitLeavesTheCollectiveUnderWay) {
  std::atomic<bool> late = false;
  RunRanks(2, [&](Rank& self) {
    std::vector<float> tensor = Values(self.rank(), 1000, 1);
    Op op;
    op.requests.push_back(shm::AllReduce(Data(tensor), tensor.size()));
    op.timeout_ns = 60 * kSecond;
    if (self.rank() == 0) {
      self.engine().Submit(&op);
      EXPECT_EQ(self.engine().Wait(&op, NowNs() + kSecond / 20).code(),
                absl::StatusCode::kDeadlineExceeded);
      late = true;
    } else {
      while (!late) std::this_thread::yield();
      self.engine().Submit(&op);
    }
    EXPECT_EQ(self.engine().Wait(&op, NowNs() + op.timeout_ns), absl::OkStatus());
    EXPECT_EQ(tensor, Sums(2, 1000, 1));
  });
}

}  // namespace
}  // namespace ddp::backends::shm
