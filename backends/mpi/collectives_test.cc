// The collectives on memory, without torch: every rank of an mpirun runs the same tests at once.
#include "backends/mpi/collectives.h"

#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/mpi/mpi_group.h"
#include "backends/mpi/runtime.h"
#include "gtest/gtest.h"

namespace ddp::backends::mpi {
namespace {

using Bytes = std::vector<std::byte>;

constexpr absl::Duration kLong = absl::Seconds(60);

Runtime& TheRuntime() {
  static Runtime* const runtime = [] {
    absl::StatusOr<Runtime*> started = Runtime::Start(kLong);
    EXPECT_TRUE(started.ok()) << started.status();
    (*started)->WaitAtExit(kLong);
    return *started;
  }();
  return *runtime;
}

std::shared_ptr<MpiGroup> NewGroup(std::vector<int> world_ranks = {}) {
  if (world_ranks.empty()) {
    world_ranks.resize(TheRuntime().world_size());
    std::iota(world_ranks.begin(), world_ranks.end(), 0);
  }
  absl::StatusOr<std::shared_ptr<MpiGroup>> group = MpiGroup::Create(TheRuntime(), world_ranks);
  EXPECT_TRUE(group.ok()) << group.status();
  return *group;
}

struct Result {
  absl::Status status;
  int source = -1;
};

std::future<Result> Begin(MpiGroup& group, std::function<Coroutine(Channel&)> body,
                          absl::Duration timeout = kLong, bool is_collective = true) {
  auto done = std::make_shared<std::promise<Result>>();
  group.Submit({.is_collective = is_collective,
                .body = std::move(body),
                .describe = [] { return std::string("a test"); },
                .timeout = timeout,
                .done =
                    [done](const absl::Status& status, int source) {
                      done->set_value({status, source});
                    }});
  return done->get_future();
}

void RunAll(MpiGroup& group, std::function<Coroutine(Channel&)> body) {
  const Result result = Begin(group, std::move(body)).get();
  EXPECT_TRUE(result.status.ok()) << result.status;
}

Buffer BufferOf(Bytes& bytes) { return {bytes.data(), bytes.size()}; }

// Small numbers that differ by rank and place: sums of a few are exact in every dtype.
Bytes Sample(backends::DType dtype, size_t count, int rank) {
  Bytes bytes(count * backends::ElementSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    const int value = static_cast<int>((i * 7 + rank * 3) % 5);
    if (dtype == backends::DType::kFloat) {
      // Inexact, so that another order of summing shows.
      const float x = 0.1f * value + 1.0f / (rank + 3);
      std::memcpy(&bytes[i * 4], &x, 4);
    } else if (dtype == backends::DType::kBFloat16) {
      const float x = 1.0f + value / 128.0f;
      std::memcpy(&bytes[i * 2], reinterpret_cast<const char*>(&x) + 2, 2);
    } else if (dtype == backends::DType::kInt8) {
      bytes[i] = static_cast<std::byte>(value);
    }
  }
  return bytes;
}

// What the kernels make of all ranks' samples, in the order of ranks.
Bytes Expected(const backends::Reduction& reduction, size_t count, int size) {
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(Sample(reduction.dtype, count, rank));
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes result(inputs[0].size());
  void* output = result.data();
  if (count > 0) backends::Reduce(reduction, &output, 1, sources.data(), size, count);
  return result;
}

std::vector<backends::Reduction> Reductions() {
  return {{backends::DType::kFloat, backends::ReduceOp::kSum},
          {backends::DType::kFloat, backends::ReduceOp::kAvg, 3},
          {backends::DType::kBFloat16, backends::ReduceOp::kSum},
          {backends::DType::kInt8, backends::ReduceOp::kMax}};
}

// Around the limits of one round and of a piece.
std::vector<size_t> Counts(const backends::Reduction& reduction, int size) {
  const size_t element = backends::ElementSize(reduction.dtype);
  const size_t round = (64 << 10) / element / size;
  std::vector<size_t> counts = {0, 1, 5, round - 1, round, round + 1, 100003};
  if (reduction.dtype == backends::DType::kFloat) counts.push_back((16 << 20) / element + 3);
  return counts;
}

TEST(MpiCollectivesTest, AllReduceSumsInTheOrderOfRanks) {
  const auto group = NewGroup();
  for (const backends::Reduction& reduction : Reductions()) {
    for (size_t count : Counts(reduction, group->size())) {
      Bytes tensor = Sample(reduction.dtype, count, group->rank());
      RunAll(*group,
             [&](Channel& channel) { return AllReduce(channel, reduction, tensor.data(), count); });
      EXPECT_TRUE(tensor == Expected(reduction, count, group->size()))
          << count << " x " << Name(reduction.dtype);
    }
  }
}

TEST(MpiCollectivesTest, ReduceChangesTheRootOnly) {
  const auto group = NewGroup();
  for (const backends::Reduction& reduction : Reductions()) {
    for (size_t count : Counts(reduction, group->size())) {
      const int root = static_cast<int>(count % group->size());
      Bytes tensor = Sample(reduction.dtype, count, group->rank());
      const Bytes before = tensor;
      RunAll(*group, [&](Channel& channel) {
        return Reduce(channel, reduction, tensor.data(), count, root);
      });
      EXPECT_TRUE(tensor ==
                  (group->rank() == root ? Expected(reduction, count, group->size()) : before))
          << count << " x " << Name(reduction.dtype);
    }
  }
}

TEST(MpiCollectivesTest, ReduceScatterTakesPartsOfDifferentSizes) {
  const auto group = NewGroup();
  for (const backends::Reduction& reduction : Reductions()) {
    for (size_t count : Counts(reduction, group->size())) {
      std::vector<size_t> counts;
      std::vector<Bytes> inputs;
      std::vector<std::byte*> data;
      for (int rank = 0; rank < group->size(); ++rank) {
        counts.push_back(rank % 2 == 0 ? count : count / 2);
        inputs.push_back(Sample(reduction.dtype, counts.back(), group->rank()));
      }
      for (Bytes& input : inputs) data.push_back(input.data());
      const size_t mine = counts[group->rank()];
      Bytes output(mine * backends::ElementSize(reduction.dtype));
      RunAll(*group, [&](Channel& channel) {
        return ReduceScatter(channel, reduction, data, counts, output.data());
      });
      EXPECT_TRUE(output == Expected(reduction, mine, group->size()))
          << count << " x " << Name(reduction.dtype);
    }
  }
}

TEST(MpiCollectivesTest, GathersBroadcastsAndExchanges) {
  const auto group = NewGroup();
  const int size = group->size(), rank = group->rank();
  const auto sample = [](size_t count, int from) {
    return Sample(backends::DType::kInt8, count, from);
  };
  for (size_t count : {size_t{0}, size_t{1}, size_t{1001}, size_t{300007}}) {
    Bytes mine = sample(count, rank), block(count * size);
    RunAll(*group,
           [&](Channel& channel) { return AllGather(channel, BufferOf(mine), block.data()); });
    for (int peer = 0; peer < size; ++peer) {
      EXPECT_TRUE(std::equal(block.begin() + peer * count, block.begin() + (peer + 1) * count,
                             sample(count, peer).begin()));
    }

    // Rank r has r times as much, and sends as much to everyone.
    Bytes longer = sample(count * rank, rank);
    std::vector<Bytes> all(size);
    std::vector<Buffer> receive;
    for (int peer = 0; peer < size; ++peer) {
      all[peer].resize(count * peer);
      receive.push_back(BufferOf(all[peer]));
    }
    RunAll(*group,
           [&](Channel& channel) { return AllGatherApart(channel, BufferOf(longer), receive); });
    for (int peer = 0; peer < size; ++peer) {
      EXPECT_TRUE(all[peer] == sample(count * peer, peer));
    }

    for (int root = 0; root < size; ++root) {
      Bytes tensor = rank == root ? sample(count, root) : Bytes(count);
      RunAll(*group, [&](Channel& channel) { return Broadcast(channel, BufferOf(tensor), root); });
      EXPECT_TRUE(tensor == sample(count, root));
    }
    RunAll(*group, [&](Channel& channel) { return Barrier(channel); });
  }
}

TEST(MpiCollectivesTest, MessagesGoByTagAndFromAnySource) {
  const auto group = NewGroup();
  if (group->size() == 1) GTEST_SKIP() << "needs two ranks";
  const int size = group->size(), rank = group->rank();
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  Bytes first(1000, std::byte(rank)), second(2000, std::byte(rank + 100)), a(1000), b(2000);
  // The messages are received in the other order than they are sent.
  auto receive_second = Begin(
      *group, [&](Channel& channel) { return Receive(channel, BufferOf(b), left, 2); }, kLong,
      false);
  auto send_first = Begin(
      *group, [&](Channel& channel) { return Send(channel, BufferOf(first), right, 1); }, kLong,
      false);
  auto send_second = Begin(
      *group, [&](Channel& channel) { return Send(channel, BufferOf(second), right, 2); }, kLong,
      false);
  EXPECT_TRUE(receive_second.get().status.ok());
  // A collective overtakes messages.
  RunAll(*group, [&](Channel& channel) { return Barrier(channel); });
  auto receive_first = Begin(
      *group, [&](Channel& channel) { return Receive(channel, BufferOf(a), kAnySource, 1); }, kLong,
      false);
  const Result result = receive_first.get();
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.source, left);
  EXPECT_TRUE(send_first.get().status.ok());
  EXPECT_TRUE(send_second.get().status.ok());
  EXPECT_TRUE(a == Bytes(1000, std::byte(left)));
  EXPECT_TRUE(b == Bytes(2000, std::byte(left + 100)));
}

TEST(MpiCollectivesTest, TwoGroupsOfTwoThreadsDoNotMeet) {
  const std::shared_ptr<MpiGroup> groups[] = {NewGroup(), NewGroup()};
  std::vector<std::thread> threads;
  for (int index = 0; index < 2; ++index) {
    threads.emplace_back([&, index] {
      MpiGroup& group = *groups[index];
      const backends::Reduction sum{backends::DType::kFloat, backends::ReduceOp::kSum};
      std::vector<Bytes> tensors;
      std::vector<std::future<Result>> results;
      for (int i = 0; i < 50; ++i) {
        tensors.push_back(Sample(backends::DType::kFloat, 100 + i * 977 + index, group.rank()));
      }
      for (int i = 0; i < 50; ++i) {
        results.push_back(Begin(group, [&, i](Channel& channel) {
          return AllReduce(channel, sum, tensors[i].data(), 100 + i * 977 + index);
        }));
      }
      for (int i = 0; i < 50; ++i) {
        EXPECT_TRUE(results[i].get().status.ok());
        EXPECT_TRUE(tensors[i] == Expected(sum, 100 + i * 977 + index, group.size()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MpiCollectivesTest, SubGroupsHaveRanksOfTheirOwn) {
  const int size = TheRuntime().world_size(), rank = TheRuntime().world_rank();
  std::vector<int> members;  // those of this rank's parity, the last first
  for (int peer = size - 1; peer >= 0; --peer) {
    if (peer % 2 == rank % 2) members.push_back(peer);
  }
  const auto group = NewGroup(members);
  EXPECT_EQ(group->world_ranks()[group->rank()], rank);
  Bytes tensor(10, std::byte(group->rank() == 0 ? rank : 0));
  RunAll(*group,
         [&](Channel& channel) { return Broadcast(channel, BufferOf(tensor), /*root=*/0); });
  EXPECT_TRUE(tensor == Bytes(10, std::byte(members[0])));
}

// Rank 1 does not come. The others learn its name, the group is broken, and another can be made.
TEST(MpiCollectivesTest, ATimeoutNamesWhoIsMissingAndBreaksTheGroup) {
  const auto group = NewGroup();
  if (group->size() == 1) GTEST_SKIP() << "needs two ranks";
  const backends::Reduction sum{backends::DType::kFloat, backends::ReduceOp::kSum};
  // Few enough bytes for MPI to take them whether or not somebody asks for them.
  constexpr size_t kCount = 100;
  if (group->rank() != 1) {
    const auto tensor =
        std::make_shared<Bytes>(Sample(backends::DType::kFloat, kCount, group->rank()));
    const auto reduce = [sum, tensor](Channel& channel) {
      return AllReduce(channel, sum, tensor->data(), kCount);
    };
    auto first = Begin(*group, reduce, absl::Seconds(3));
    auto behind = Begin(*group, reduce);
    const absl::Status status = first.get().status;
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "Timed out after 3s")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "nothing has come from rank 1")) << status;
    const absl::Status second = behind.get().status;
    EXPECT_TRUE(absl::StrContains(second.message(), "broken since")) << second;
    EXPECT_TRUE(absl::StrContains(Begin(*group, reduce).get().status.message(), "broken since"));
  }
  const auto another = NewGroup();
  Bytes again = Sample(backends::DType::kFloat, 1000, group->rank());
  RunAll(*another, [&](Channel& channel) { return AllReduce(channel, sum, again.data(), 1000); });
  EXPECT_TRUE(again == Expected(sum, 1000, another->size()));
}

TEST(MpiCollectivesTest, AbortFailsWhatIsUnderWay) {
  const auto group = NewGroup();
  if (group->size() == 1) GTEST_SKIP() << "needs two ranks";
  Bytes tensor(1);
  auto receive = Begin(
      *group, [&](Channel& channel) { return Receive(channel, BufferOf(tensor), kAnySource, 7); },
      kLong, false);
  group->Abort(absl::CancelledError("enough"));
  EXPECT_EQ(receive.get().status.code(), absl::StatusCode::kCancelled);
  const auto another = NewGroup();
  RunAll(*another, [&](Channel& channel) { return Barrier(channel); });
}

TEST(MpiCollectivesTest, DifferentSizesAreAnErrorOnBothSides) {
  const auto group = NewGroup();
  if (group->size() != 2) GTEST_SKIP() << "needs two ranks";
  for (const size_t count : {size_t{10}, size_t{10000}, size_t{1000000}}) {
    const auto another = NewGroup();
    const size_t mine = another->rank() == 0 ? count : count + count / 10;
    const backends::Reduction sum{backends::DType::kInt8, backends::ReduceOp::kSum};
    const auto tensor = std::make_shared<Bytes>(mine);
    const absl::Status status =
        Begin(*another,
              [=](Channel& channel) { return AllReduce(channel, sum, tensor->data(), mine); })
            .get()
            .status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "tensors of different sizes")) << status;
  }
}

// The tag is the operation's: what is sent in another is not taken for it.
TEST(MpiCollectivesTest, DifferentCallsMissEachOther) {
  const auto group = NewGroup();
  if (group->size() != 2) GTEST_SKIP() << "needs two ranks";
  const auto tensor = std::make_shared<Bytes>(64);
  auto done = std::make_shared<std::promise<absl::Status>>();
  Operation operation;
  operation.signature = group->rank();
  operation.body = [=](Channel& channel) {
    return AllReduce(channel, {backends::DType::kInt8, backends::ReduceOp::kSum}, tensor->data(),
                     64);
  };
  operation.describe = [] { return std::string("a test"); };
  operation.timeout = absl::Milliseconds(200);
  operation.done = [done](const absl::Status& status, int) { done->set_value(status); };
  group->Submit(std::move(operation));
  const absl::Status status = done->get_future().get();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST(MpiCollectivesTest, MonitoredBarrierTellsEveryoneWhoIsMissing) {
  const auto group = NewGroup();
  if (group->size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto monitored = [&](absl::Duration timeout) {
    auto reply = std::make_shared<BarrierReply>();
    auto done = std::make_shared<std::promise<absl::Status>>();
    Operation operation;
    operation.body = [reply](Channel& channel) { return MonitoredBarrier(channel, *reply); };
    operation.describe = [] { return std::string("monitored_barrier"); };
    operation.timeout = group->rank() == 0 ? timeout : kLong;
    operation.done = [done](const absl::Status& status, int) { done->set_value(status); };
    if (group->rank() == 0) {
      operation.on_timeout = [reply, &group](Channel& channel) {
        return ReportMissingRanks(channel, *reply, [&](int rank) { return group->NameOf(rank); });
      };
    }
    group->Submit(std::move(operation));
    return done->get_future().get();
  };
  EXPECT_TRUE(monitored(kLong).ok());
  const int absent = group->size() - 1;
  if (group->rank() == absent) return;
  const absl::Status status = monitored(absl::Seconds(3));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "never came: " + group->NameOf(absent)))
      << status;
}

TEST(MpiCollectivesTest, MessagesBeyondTwoGigabytes) {
  if (std::getenv("DDP_TEST_LARGE") == nullptr) GTEST_SKIP() << "set DDP_TEST_LARGE=1: 5 GB";
  const auto group = NewGroup();
  if (group->size() != 2) GTEST_SKIP() << "needs two ranks";
  Bytes tensor((size_t{1} << 31) + 12345, std::byte(0));
  if (group->rank() == 0) {
    for (size_t i = 0; i < tensor.size(); i += 997) tensor[i] = std::byte(i / 997);
    EXPECT_TRUE(
        Begin(
            *group, [&](Channel& c) { return Send(c, BufferOf(tensor), 1, 5); }, kLong, false)
            .get()
            .status.ok());
    return;
  }
  const Result result =
      Begin(
          *group, [&](Channel& c) { return Receive(c, BufferOf(tensor), 0, 5); }, kLong, false)
          .get();
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (size_t i = 0; i < tensor.size(); ++i) {
    ASSERT_EQ(tensor[i], i % 997 == 0 ? std::byte(i / 997) : std::byte(0)) << i;
  }
}

}  // namespace
}  // namespace ddp::backends::mpi
