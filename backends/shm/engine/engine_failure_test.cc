#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/shm/engine/engine.h"
#include "backends/shm/engine/ranks_as_threads.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

// The slot's hash detects the difference of the small calls, the records that of the large ones.
TEST(EngineFailureTest, DifferentCallsAreAnErrorThatShowsBoth) {
  for (size_t count : {size_t{10}, size_t{100'000}}) {
    const std::string of_rank_0 = absl::StrCat("allreduce(SUM) of ", count, " x float32");
    RunEngines(2, [&](Rank& self) {
      std::vector<float> tensor(count);
      Request request = shm::AllReduce(Data(tensor), count);
      if (self.rank() == 1) {
        request.kind = Kind::kBroadcast;
        request.count *= sizeof(float);
        request.reduction.dtype = DType::kInt32;
      }
      const std::string of_rank_1 = absl::StrCat("broadcast(root 0) of ", 4 * count, " bytes");
      const absl::Status status = self.Run(std::move(request));
      EXPECT_TRUE(absl::StrContains(status.message(), of_rank_0)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), of_rank_1)) << status;
    });
  }
}

TEST(EngineFailureTest, WhatIsMovedHasADtypeToo) {
  for (size_t bytes : {size_t{40}, size_t{400'000}}) {
    RunEngines(2, [&](Rank& self) {
      std::vector<float> tensor(bytes / sizeof(float));
      Request request;
      request.kind = Kind::kBroadcast;
      request.tensor = Data(tensor);
      request.count = bytes;
      request.reduction.dtype = self.rank() == 0 ? DType::kFloat : DType::kInt32;
      const absl::Status status = self.Run(std::move(request));
      EXPECT_TRUE(absl::StrContains(status.message(), "bytes of float32")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "bytes of int32")) << status;
    });
  }
}

TEST(EngineFailureTest, OneSlowOneLongIsAnErrorNotAHang) {
  RunEngines(2, [&](Rank& self) {
    std::vector<float> tensor(self.rank() == 0 ? 10 : 1'000'000);
    const absl::Status status = self.Run(shm::AllReduce(Data(tensor), tensor.size()));
    EXPECT_TRUE(absl::StrContains(status.message(), "10 x float")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "1000000 x float")) << status;
  });
}

TEST(EngineFailureTest, AMissingRankIsNamedAtTheDeadline) {
  std::atomic<bool> over = false;
  RunEngines(3, [&](Rank& self) {
    if (self.rank() == 1) {
      while (!over) std::this_thread::yield();
      return;
    }
    std::vector<float> tensor(10);
    const absl::Status status = self.Run(shm::AllReduce(Data(tensor), tensor.size()), 3 * kSecond);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(absl::StrContains(status.message(), "Timed out; not called by rank 1")) << status;
    // Later operations fail, too.
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
      EXPECT_TRUE(absl::StrContains(status.message(), "Connection closed by peer: rank 2 has died"))
          << status;
    });
  }
  alive = false;
  for (std::thread& thread : threads) thread.join();
}

TEST(EngineFailureTest, LeavingEndsThoseThatWaitForTheRank) {
  RunEngines(2, [&](Rank& self) {
    std::vector<float> tensor(10);
    ASSERT_EQ(self.Run(shm::AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
    if (self.rank() == 1) return self.Leave();
    const absl::Status status = self.Run(Request());
    EXPECT_TRUE(
        absl::StrContains(status.message(), "Connection closed by peer: rank 1 has left the group"))
        << status;
  });
}

TEST(EngineFailureTest, AReceiveFromAnyRankEndsWhenAllOthersHaveLeft) {
  std::atomic<bool> received = false;
  RunEngines(3, [&](Rank& self) {
    std::vector<float> tensor(10);
    Request message;
    message.kind = self.rank() == 0 ? Kind::kRecv : Kind::kSend;
    message.root = self.rank() == 0 ? kAnySource : 0;
    message.tensor = Data(tensor);
    message.count = tensor.size() * sizeof(float);
    if (self.rank() == 2) {
      while (!received) std::this_thread::yield();
      return self.Leave();
    }
    // One that has left has sent; another is still there.
    ASSERT_EQ(self.Run(message), absl::OkStatus());
    if (self.rank() == 1) return self.Leave();
    received = true;
    const absl::Status status = self.Run(message);
    EXPECT_TRUE(absl::StrContains(status.message(), "all other ranks have left")) << status;
  });
}

TEST(EngineFailureTest, AForkedChildThatEndsDoesNotLeaveForItsParent) {
  RunEngines(2, [&](Rank& self) {
    std::vector<float> tensor(10);
    ASSERT_EQ(self.Run(shm::AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
    if (self.rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        self.Leave();
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
    EXPECT_EQ(self.Run(shm::AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
  });
}

TEST(EngineFailureTest, LeavingWithWorkUnderWayCancelsIt) {
  RunEngines(2, [&](Rank& self) {
    if (self.rank() == 1) return;
    std::vector<float> tensor(1'000'000);
    EngineOp op;
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
  RunEngines(2, [&](Rank& self) {
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

// A peer that is stopped in the middle of writing to a tensor is played by its word in the segment.
TEST(EngineFailureTest, NoTensorIsGivenBackWhileAPeerWritesToIt) {
  std::atomic<bool> writing = false;
  std::atomic<EngineOp*> under_way = nullptr;
  RunEngines(2, [&](Rank& self) {
    if (self.rank() == 1) {
      while (!writing) std::this_thread::yield();
      std::vector<float> tensor(1'000'000);
      EngineOp op;
      op.requests.push_back(shm::AllReduce(Data(tensor), tensor.size()));
      op.timeout_ns = 60 * kSecond;
      self.engine().Submit(&op);
      under_way = &op;
      self.engine().Abort(absl::AbortedError("aborted"));
      EXPECT_TRUE(op.done());
      under_way = nullptr;
      return;
    }
    self.view().control(0).writing = 1;
    writing = true;
    while (under_way == nullptr || self.engine().failure().ok()) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) {
      EXPECT_FALSE(under_way.load()->done());
      std::this_thread::yield();
    }
    self.view().control(0).writing = 0;
    while (under_way != nullptr) std::this_thread::yield();
  });
}

TEST(EngineFailureTest, WaitWithItsOwnTimeLimitLeavesTheCollectiveUnderWay) {
  std::atomic<bool> late = false;
  RunEngines(2, [&](Rank& self) {
    std::vector<float> tensor = Values(self.rank(), 1000, 1);
    EngineOp op;
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
