#include "backends/shm/engine/engine.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "backends/shm/engine/ranks_as_threads.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

// The counts are around every limit: mailbox, slot, chunk, several chunks.
std::vector<size_t> Counts(const View& view) {
  const size_t chunk = view.layout().chunk_bytes() / sizeof(float);
  return {0, 1, 13, 14, 15, 1023, 1024, 1025, 5000, chunk - 1, chunk, chunk + 1, 3 * chunk + 7};
}

// Small chunks make many of them out of little data.
const Limits kTight = {.segment_bytes = 3 << 20, .arena_bytes = 0};

std::unique_ptr<EngineOp> Message(Kind kind, int peer, int tag, std::vector<float>& data) {
  auto op = std::make_unique<EngineOp>();
  Request request;
  request.kind = kind;
  request.root = peer;
  request.tag = tag;
  request.tensor = Data(data);
  request.count = data.size() * sizeof(float);
  op->requests.push_back(std::move(request));
  op->timeout_ns = 60 * kSecond;
  return op;
}

class EngineTest : public testing::TestWithParam<int> {};

TEST_P(EngineTest, AllReduce) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          std::vector<float> tensor = Values(self.rank(), count, ++round);
          ASSERT_EQ(self.Run(shm::AllReduce(Data(tensor), count)), absl::OkStatus());
          ASSERT_EQ(tensor, Sums(self.world_size(), count, round)) << count;
        }
      },
      kTight);
}

TEST_P(EngineTest, AllReduceInTheArenaAndMixed) {
  RunEngines(GetParam(),
             [](Rank& self) {
               int round = 0;
               for (size_t count : Counts(self.view())) {
                 for (int outside = -1; outside < self.world_size(); ++outside) {
                   std::vector<float> expected = Values(self.rank(), count, ++round);
                   std::vector<float> ordinary = expected;
                   std::byte* tensor = self.rank() == outside
                                           ? Data(ordinary)
                                           : self.view().arena(self.rank()) + 64 * self.rank();
                   if (count != 0) std::memcpy(tensor, expected.data(), count * sizeof(float));
                   ASSERT_EQ(self.Run(shm::AllReduce(tensor, count)), absl::OkStatus());
                   expected = Sums(self.world_size(), count, round);
                   ASSERT_EQ(
                       count == 0 ? 0 : std::memcmp(tensor, expected.data(), count * sizeof(float)),
                       0)
                       << count << " elements, outside the arena: rank " << outside;
                 }
               }
             },
             {.segment_bytes = 3 << 20, .arena_bytes = 4 << 20});
}

TEST_P(EngineTest, ProgressEndsWhenItsCallerHasWhatItWantsOrNothingIsUnderWay) {
  std::atomic<bool> others_may_start = false;
  RunEngines(GetParam(), [&](Rank& self) {
    self.engine().Progress([] { return false; });  // nothing is under way
    std::vector<float> tensor = Values(self.rank(), 100'000, 1);
    EngineOp op;
    op.requests.push_back(shm::AllReduce(Data(tensor), tensor.size()));
    op.timeout_ns = 60 * kSecond;
    while (self.rank() != 0 && !others_may_start) std::this_thread::yield();
    self.engine().Submit(&op);
    int asked = 0;
    self.engine().Progress([&] {
      if (self.rank() == 0) others_may_start = true;
      ++asked;
      return op.done();
    });
    EXPECT_TRUE(op.done());
    EXPECT_GE(asked, 1);
    ASSERT_EQ(self.engine().Wait(&op, NowNs() + kSecond), absl::OkStatus());
    EXPECT_EQ(tensor, Sums(self.world_size(), tensor.size(), 1));
  });
}

TEST_P(EngineTest, ReduceLeavesOtherRanksTensorsAlone) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          const int root = ++round % self.world_size();
          std::vector<float> tensor = Values(self.rank(), count, round);
          Request request = shm::AllReduce(Data(tensor), count);
          request.kind = Kind::kReduce;
          request.root = root;
          ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
          ASSERT_EQ(tensor, self.rank() == root ? Sums(self.world_size(), count, round)
                                                : Values(self.rank(), count, round));
        }
      },
      kTight);
}

TEST_P(EngineTest, BroadcastFromEveryRoot) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          const int root = ++round % self.world_size();
          std::vector<float> tensor = Values(self.rank(), count, round);
          Request request;
          request.kind = Kind::kBroadcast;
          request.root = root;
          request.tensor = Data(tensor);
          request.count = count * sizeof(float);
          ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
          ASSERT_EQ(tensor, Values(root, count, round));
        }
      },
      kTight);
}

TEST_P(EngineTest, AllGatherOfDifferentSizes) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          ++round;
          const auto count_of = [&](int rank) { return count + rank * 3; };
          std::vector<float> mine = Values(self.rank(), count_of(self.rank()), round);
          std::vector<std::vector<float>> all(self.world_size());
          Request request;
          request.kind = Kind::kAllGather;
          request.send.push_back(ToBuffer(mine));
          for (int rank = 0; rank < self.world_size(); ++rank) {
            all[rank].resize(count_of(rank));
            request.recv.push_back(ToBuffer(all[rank]));
          }
          ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
          for (int rank = 0; rank < self.world_size(); ++rank) {
            ASSERT_EQ(all[rank], Values(rank, count_of(rank), round));
          }
        }
      },
      kTight);
}

// Data moves from tensor to tensor where all ranks allow it, through the stages where one does not.
TEST_P(EngineTest, LargeMovesWithAndWithoutAccessToPeersMemory) {
  for (const bool direct : {true, false}) {
    RunEngines(GetParam(),
               [](Rank& self) {
                 for (int round = 1; round <= 8; ++round) {
                   const auto count_of = [&](int rank) -> size_t {
                     return rank == round % 3 ? 0 : 20'000 + 1000 * rank + round;
                   };
                   std::vector<std::vector<float>> all(self.world_size());
                   Request gather;
                   gather.kind = Kind::kAllGather;
                   for (int rank = 0; rank < self.world_size(); ++rank) {
                     all[rank].resize(count_of(rank));
                     gather.recv.push_back(ToBuffer(all[rank]));
                   }
                   std::vector<float> mine = Values(self.rank(), count_of(self.rank()), round);
                   // Every other round is in place.
                   const bool in_place = round % 2 == 0;
                   if (in_place) all[self.rank()] = mine;
                   gather.recv[self.rank()] = ToBuffer(all[self.rank()]);
                   gather.send.push_back(ToBuffer(in_place ? all[self.rank()] : mine));
                   ASSERT_EQ(self.Run(std::move(gather)), absl::OkStatus());
                   for (int rank = 0; rank < self.world_size(); ++rank) {
                     ASSERT_EQ(all[rank], Values(rank, count_of(rank), round));
                   }
                   // What was lent may be changed at once.
                   std::fill(mine.begin(), mine.end(), -1.0f);

                   const int root = round % self.world_size();
                   std::vector<float> tensor = Values(self.rank(), 30'011, round);
                   Request broadcast;
                   broadcast.kind = Kind::kBroadcast;
                   broadcast.root = root;
                   broadcast.tensor = Data(tensor);
                   broadcast.count = tensor.size() * sizeof(float);
                   ASSERT_EQ(self.Run(std::move(broadcast)), absl::OkStatus());
                   ASSERT_EQ(tensor, Values(root, 30'011, round));
                 }
               },
               /*limits=*/{}, {.direct = direct});
  }
}

TEST_P(EngineTest, ReduceScatter) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          ++round;
          std::vector<float> whole = Values(self.rank(), count * self.world_size(), round);
          std::vector<float> result(count);
          Request request = shm::AllReduce(Data(result), count);
          request.kind = Kind::kReduceScatter;
          for (int rank = 0; rank < self.world_size(); ++rank) {
            request.send.push_back(
                {Data(whole) + rank * count * sizeof(float), count * sizeof(float)});
          }
          ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
          const std::vector<float> sums = Sums(self.world_size(), count * self.world_size(), round);
          const auto begin = sums.begin() + self.rank() * count;
          ASSERT_EQ(result, std::vector<float>(begin, begin + count));
        }
      },
      kTight);
}

TEST_P(EngineTest, ReduceScatterInTheArenaAndMixed) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : {300, 5'000, 20'011}) {
          for (int outside = -1; outside < self.world_size(); ++outside) {
            const size_t whole = count * self.world_size();
            const size_t bytes = count * sizeof(float);
            const std::vector<float> values = Values(self.rank(), whole, ++round);
            std::vector<float> ordinary = values;
            std::byte* input = self.rank() == outside
                                   ? Data(ordinary)
                                   : self.view().arena(self.rank()) + 64 * self.rank();
            std::memcpy(input, values.data(), whole * sizeof(float));
            // Every other round is in place.
            std::vector<float> separate(count);
            std::byte* result = round % 2 == 0 ? input + self.rank() * bytes : Data(separate);
            Request request = shm::AllReduce(result, count);
            request.kind = Kind::kReduceScatter;
            for (int rank = 0; rank < self.world_size(); ++rank) {
              request.send.push_back({input + rank * bytes, bytes});
            }
            ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
            std::vector<float> expected = Sums(self.world_size(), whole, round);
            ASSERT_EQ(std::memcmp(result, expected.data() + self.rank() * count, bytes), 0)
                << count << " elements, outside the arena: rank " << outside;
            // What other ranks get is left as it was.
            for (int rank = 0; rank < self.world_size(); ++rank) {
              if (rank == self.rank()) continue;
              ASSERT_EQ(std::memcmp(input + rank * bytes, values.data() + rank * count, bytes), 0);
            }
          }
        }
      },
      {.segment_bytes = 3 << 20, .arena_bytes = 4 << 20});
}

TEST_P(EngineTest, AllToAllOfUnequalAndEmptyParts) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        int round = 0;
        for (size_t count : Counts(self.view())) {
          ++round;
          const auto count_of = [&](int from, int to) { return (from + to) % 3 * count; };
          std::vector<std::vector<float>> out(self.world_size()), in(self.world_size());
          Request request;
          request.kind = Kind::kAllToAll;
          for (int rank = 0; rank < self.world_size(); ++rank) {
            out[rank] = Values(self.rank() * 10 + rank, count_of(self.rank(), rank), round);
            in[rank].resize(count_of(rank, self.rank()));
            request.send.push_back(ToBuffer(out[rank]));
            request.recv.push_back(ToBuffer(in[rank]));
          }
          ASSERT_EQ(self.Run(std::move(request)), absl::OkStatus());
          for (int rank = 0; rank < self.world_size(); ++rank) {
            ASSERT_EQ(in[rank],
                      Values(rank * 10 + self.rank(), count_of(rank, self.rank()), round));
          }
        }
      },
      kTight);
}

// What a broadcast's root leaves behind must not be overwritten before it has been read, whatever
// comes next and however far the root runs ahead.
TEST_P(EngineTest, RandomSequencesWithSeveralInFlight) {
  RunEngines(
      GetParam(),
      [](Rank& self) {
        std::minstd_rand random(42);  // the same on all ranks
        const std::vector<size_t> counts = Counts(self.view());
        for (int batch = 0; batch < 40; ++batch) {
          const int size = 1 + random() % 6;
          std::vector<std::vector<float>> tensors;
          std::vector<std::vector<float>> expected;
          std::vector<std::unique_ptr<EngineOp>> ops;
          for (int i = 0; i < size; ++i) {
            const size_t count = counts[random() % counts.size()];
            const int round = static_cast<int>(random() % 1000);
            const int root = static_cast<int>(random() % self.world_size());
            tensors.push_back(Values(self.rank(), count, round));
            Request request = shm::AllReduce(Data(tensors.back()), count);
            switch (random() % 3) {
              case 0:
                expected.push_back(Sums(self.world_size(), count, round));
                break;
              case 1:
                request.kind = Kind::kBroadcast;
                request.root = root;
                request.count = count * sizeof(float);
                expected.push_back(Values(root, count, round));
                break;
              default:
                request.kind = Kind::kReduce;
                request.root = root;
                expected.push_back(self.rank() == root ? Sums(self.world_size(), count, round)
                                                       : tensors.back());
            }
            ops.push_back(std::make_unique<EngineOp>());
            ops.back()->requests.push_back(std::move(request));
            ops.back()->timeout_ns = 60 * kSecond;
            self.engine().Submit(ops.back().get());
          }
          for (int i = size - 1; i >= 0; --i) {
            ASSERT_EQ(self.engine().Wait(ops[i].get(), NowNs() + 60 * kSecond), absl::OkStatus());
            ASSERT_EQ(tensors[i], expected[i]);
          }
        }
      },
      kTight);
}

TEST_P(EngineTest, MessagesByTagInAnyOrder) {
  RunEngines(GetParam(), [](Rank& self) {
    const int n = self.world_size();
    if (n == 1) return;
    const int next = (self.rank() + 1) % n, previous = (self.rank() + n - 1) % n;
    constexpr size_t kLong = 300'000;  // more than the channel holds
    std::vector<float> a = Values(self.rank(), kLong, 1), b = Values(self.rank(), 10, 2);
    std::vector<float> got_a(kLong), got_b(10), got_c(0);
    std::vector<float> empty;
    std::unique_ptr<EngineOp> ops[] = {
        Message(Kind::kSend, next, 1, a),           Message(Kind::kSend, next, 2, b),
        Message(Kind::kSend, next, 3, empty),       Message(Kind::kRecv, previous, 3, got_c),
        Message(Kind::kRecv, kAnySource, 2, got_b), Message(Kind::kRecv, previous, 1, got_a)};
    for (auto& op : ops) self.engine().Submit(op.get());
    for (auto& op : ops) {
      ASSERT_EQ(self.engine().Wait(op.get(), NowNs() + 60 * kSecond), absl::OkStatus());
    }
    EXPECT_EQ(got_a, Values(previous, kLong, 1));
    EXPECT_EQ(got_b, Values(previous, 10, 2));
    EXPECT_EQ(ops[4]->source(), previous);
  });
}

// The answer that one thread waits for comes after what another thread sends meanwhile.
TEST(EngineThreadsTest, AThreadThatWaitsTakesWhatOthersSubmit) {
  RunEngines(2,
             [](Rank& self) {
               std::vector<float> question = Values(self.rank(), 10, 1), answer = question;
               const auto run = [&](Kind kind, int tag, std::vector<float>& data) {
                 const auto op = Message(kind, 1 - self.rank(), tag, data);
                 self.engine().Submit(op.get());
                 EXPECT_EQ(self.engine().Wait(op.get(), NowNs() + 60 * kSecond), absl::OkStatus());
               };
               const int64_t began = NowNs();
               if (self.rank() == 1) {
                 run(Kind::kRecv, 1, question);
                 run(Kind::kSend, 2, question);
                 return;
               }
               std::thread waits([&] { run(Kind::kRecv, 2, answer); });
               std::this_thread::sleep_for(std::chrono::milliseconds(20));
               run(Kind::kSend, 1, question);
               waits.join();
               EXPECT_EQ(answer, question);
               // It would have yielded for so long.
               EXPECT_LT(NowNs() - began, 10 * kSecond);
             },
             kTight, {.wait_yield_ns = 20 * kSecond});
}

TEST_P(EngineTest, NobodyHasToWaitForACollectiveToHappen) {
  std::atomic<int> done = 0;
  RunEngines(GetParam(), [&done](Rank& self) {
    std::vector<float> tensor = Values(self.rank(), 100'000, 1);
    EngineOp op;
    op.requests.push_back(shm::AllReduce(Data(tensor), tensor.size()));
    op.timeout_ns = 60 * kSecond;
    self.engine().Submit(&op);
    while (!op.done()) std::this_thread::yield();
    ++done;
    // The others may still need this rank's group thread for their copy.
    while (done.load() < self.world_size()) std::this_thread::yield();
    EXPECT_EQ(tensor, Sums(self.world_size(), tensor.size(), 1));
  });
}

// The group's thread is rung while the caller still drives, and while it does not: either way it
// has to see to what is left.
TEST_P(EngineTest, ManyInARowThatNobodyWaitsFor) {
  RunEngines(GetParam(), [](Rank& self) {
    for (int round = 0; round < 500; ++round) {
      std::vector<float> tensor = Values(self.rank(), 162, round);
      EngineOp op;
      op.requests.push_back(AllReduce(Data(tensor), tensor.size()));
      op.timeout_ns = 60 * kSecond;
      self.engine().Submit(&op);
      while (!op.done()) std::this_thread::yield();
      ASSERT_EQ(op.status(), absl::OkStatus());
      ASSERT_EQ(tensor, Sums(self.world_size(), tensor.size(), round));
    }
  });
}

// No spinning, no yielding: every wait sleeps, so a lost wake-up shows as 50 ms each.
TEST_P(EngineTest, SleepingAtEveryWait) {
  RunEngines(GetParam(),
             [](Rank& self) {
               for (int round = 0; round < 300; ++round) {
                 std::vector<float> tensor = Values(self.rank(), round * 37, round);
                 ASSERT_EQ(self.Run(shm::AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
                 ASSERT_EQ(tensor, Sums(self.world_size(), tensor.size(), round));
               }
             },
             kTight, {.spin_ns = 0, .wait_yield_ns = 0, .submit_yield_ns = 0});
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, EngineTest, testing::Values(1, 2, 3, 4, 8));

}  // namespace
}  // namespace ddp::backends::shm
