#include "backends/gloo/gloo_backend.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/div.h"
#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::gloo {
namespace {

using at::Tensor;
using c10::ScalarType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr int kRanks = 3;

// Runs `body` as each of kRanks ranks over gloo.
void RunRanks(const std::function<void(int rank, const BackendPtr& gloo)>& body,
              absl::Duration timeout = absl::Seconds(60)) {
  RunRankThreads(
      kRanks, "gloo",
      [&](const launchers::Rank& rank, const Group& group) {
        body(rank.rank, group.process_group->getBackend(c10::kCPU));
      },
      timeout);
}

constexpr ScalarType kForeign[] = {at::kShort,       at::kUInt16,        at::kUInt32,
                                   at::kUInt64,      at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                                   at::kComplexHalf, at::kComplexFloat,  at::kComplexDouble};

// Values that differ by rank and position and are exact in every dtype.
Tensor Sample(int rank, int64_t n, ScalarType dtype) {
  return (at::arange(n, at::kLong).remainder(5) + rank + 1).to(dtype);
}

bool SameBytes(const Tensor& a, const Tensor& b) {
  const Tensor x = a.contiguous();
  const Tensor y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

// The same values in every second element of a tensor twice as long.
Tensor WithGaps(const Tensor& values) {
  const Tensor wide = at::full({values.numel() * 2}, 77, values.options());
  Tensor view = wide.as_strided({values.numel()}, {2});
  view.copy_(values);
  return view;
}

// Whether what lies between the elements is as WithGaps left it.
bool GapsAreUntouched(const Tensor& view) {
  const Tensor gaps = view.as_strided({view.numel()}, {2}, view.storage_offset() + 1);
  return at::equal(gaps, at::full_like(gaps, 77));
}

class ForeignDtypeTest : public testing::TestWithParam<int64_t> {};

TEST_P(ForeignDtypeTest, IsMovedBitByBit) {
  const int64_t n = GetParam();
  RunRanks([&](int rank, const BackendPtr& gloo) {
    for (ScalarType dtype : kForeign) {
      const auto of = [&](int peer) { return Sample(peer, n, dtype); };
      const auto fresh = [&] { return at::zeros({n}, dtype); };
      const auto all = [&] {
        Tensors tensors;
        for (int peer = 0; peer < kRanks; ++peer) tensors.push_back(fresh());
        return tensors;
      };
      Tensors mine = {of(rank)};
      Tensors shared = {of(rank)};
      gloo->broadcast(shared, {.rootRank = 1})->wait();
      EXPECT_TRUE(SameBytes(shared[0], of(1))) << dtype;

      std::vector<Tensors> lists = {all()};
      gloo->allgather(lists, mine)->wait();
      EXPECT_TRUE(SameBytes(lists[0][2], of(2))) << dtype;

      Tensor base = at::zeros({n * kRanks}, dtype);
      gloo->all_gather_single(base, mine[0])->wait();
      EXPECT_TRUE(SameBytes(base.narrow(0, n, n), of(1))) << dtype;

      Tensors two = {of(rank), of(rank + 3)};
      Tensors into = {at::zeros({n * kRanks}, dtype), at::zeros({n * kRanks}, dtype)};
      gloo->all_gather_single_coalesced(into, two)->wait();
      EXPECT_TRUE(SameBytes(into[1].narrow(0, 2 * n, n), of(5))) << dtype;

      std::vector<Tensors> gathered;
      if (rank == 0) gathered = {all()};
      gloo->gather(gathered, mine)->wait();
      if (rank == 0) {
        EXPECT_TRUE(SameBytes(gathered[0][2], of(2))) << dtype;
      }

      std::vector<Tensors> scattered;
      if (rank == 0) scattered = {{of(4), of(5), of(6)}};
      Tensors part = {fresh()};
      gloo->scatter(part, scattered)->wait();
      EXPECT_TRUE(SameBytes(part[0], of(4 + rank))) << dtype;

      // n rows to each rank, of two columns.
      Tensor sent = Sample(rank, 2 * n * kRanks, dtype).view({n * kRanks, 2});
      Tensor received = at::zeros({n * kRanks, 2}, dtype);
      std::vector<int64_t> equal;
      gloo->all_to_all_single(received, sent, equal, equal)->wait();
      EXPECT_TRUE(SameBytes(received.narrow(0, n, n),
                            Sample(1, 2 * n * kRanks, dtype).narrow(0, 2 * n * rank, 2 * n)))
          << dtype;
      std::vector<int64_t> to_last = {0, 0, n * kRanks};
      std::vector<int64_t> from_all(kRanks, rank == 2 ? n * kRanks : 0);
      received = at::zeros({rank == 2 ? n * kRanks * kRanks : 0, 2}, dtype);
      gloo->all_to_all_single(received, sent, from_all, to_last)->wait();
      if (rank == 2) {
        EXPECT_TRUE(
            SameBytes(received.narrow(0, n * kRanks, n * kRanks), Sample(1, 2 * n * kRanks, dtype)))
            << dtype;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, ForeignDtypeTest, testing::Values(0, 1, 1001),
                         testing::PrintToStringParamName());

// Each reduction in each of its six forms, on inputs whose result on all ranks is `expected`.
void ExpectReduction(const ReduceOp& op, const std::vector<Tensor>& inputs,
                     const Tensor& expected) {
  const int64_t n = expected.numel() / kRanks;
  RunRanks([&](int rank, const BackendPtr& gloo) {
    const auto mine = [&] { return inputs[rank].clone(); };
    const auto part = [&](const Tensor& whole, int i) { return whole.narrow(0, i * n, n); };
    const auto fresh = [&] { return at::zeros({n}, expected.options()); };

    Tensors tensors = {mine()};
    gloo->allreduce(tensors, {.reduceOp = op})->wait();
    EXPECT_TRUE(SameBytes(tensors[0], expected)) << tensors[0] << expected;

    tensors = {mine(), mine()};
    c10d::AllreduceCoalescedOptions coalesced;
    coalesced.reduceOp = op;
    gloo->allreduce_coalesced(tensors, coalesced)->wait();
    EXPECT_TRUE(SameBytes(tensors[1], expected));

    tensors = {mine()};
    gloo->reduce(tensors, {.reduceOp = op, .rootRank = 1})->wait();
    if (rank == 1) {
      EXPECT_TRUE(SameBytes(tensors[0], expected));
    }

    std::vector<Tensors> lists(1);
    for (int i = 0; i < kRanks; ++i) lists[0].push_back(part(inputs[rank], i).clone());
    Tensors outputs = {fresh()};
    gloo->reduce_scatter(outputs, lists, {.reduceOp = op})->wait();
    EXPECT_TRUE(SameBytes(outputs[0], part(expected, rank)));

    Tensor output = fresh();
    Tensor input = mine();
    gloo->reduce_scatter_single(output, input, {.reduceOp = op})->wait();
    EXPECT_TRUE(SameBytes(output, part(expected, rank)));
    EXPECT_TRUE(SameBytes(input, inputs[rank])) << "an input was written to";

    outputs = {fresh(), fresh()};
    Tensors two = {mine(), mine()};
    gloo->reduce_scatter_single_coalesced(outputs, two, {.reduceOp = op})->wait();
    EXPECT_TRUE(SameBytes(outputs[1], part(expected, rank)));
  });
}

TEST(GlooBackendTest, AveragesIntegersTowardsZero) {
  for (ScalarType dtype : {at::kLong, at::kInt, at::kChar, at::kShort}) {
    const Tensor values = at::arange(-6, 6, at::kLong);  // sums of -18 … 15, by 3
    std::vector<Tensor> inputs = {(values - 1).to(dtype), values.to(dtype), (values + 2).to(dtype)};
    ExpectReduction(ReduceOp::AVG, inputs, at::div(values * 3 + 1, int64_t{3}, "trunc").to(dtype));
  }
}

TEST(GlooBackendTest, PremulSumRounds16BitFloatsOnce) {
  for (ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    std::vector<Tensor> inputs;
    Tensor sum = at::zeros({999}, at::kFloat);
    for (int rank = 0; rank < kRanks; ++rank) {
      inputs.push_back((at::arange(999, at::kFloat) * 0.37f + rank).to(dtype));
      sum += inputs[rank].to(at::kFloat) * 0.25;  // exact: few bits, and a power of two
    }
    ExpectReduction(c10d::makePreMulSum(0.25), inputs, sum.to(dtype));
  }
}

TEST(GlooBackendTest, PremulSumTakesItsFactorFromATensor) {
  for (ScalarType dtype : {at::kFloat, at::kDouble, at::kComplexFloat}) {
    const Tensor input = Sample(0, 9, dtype);
    ExpectReduction(c10d::makePreMulSum(at::full({1}, 2.0)), {input, input, input}, input * 6);
  }
}

TEST(GlooBackendTest, SumsOfBoolAreTrueAsOne) {
  const Tensor none = at::zeros({6}, at::kBool);
  const Tensor all = at::ones({6}, at::kBool);
  ExpectReduction(ReduceOp::SUM, {all, none, all}, all);
  ExpectReduction(ReduceOp::SUM, {none, none, none}, none);
}

TEST(GlooBackendTest, SumsOfNarrowIntegersWrapAround) {
  for (ScalarType dtype : {at::kShort, at::kUInt16}) {
    const Tensor big = at::full({6}, 30000, at::kInt).to(dtype);
    ExpectReduction(ReduceOp::SUM, {big, big, big},
                    at::full({6}, 90000 - 65536, at::kInt).to(dtype));
  }
}

TEST(GlooBackendTest, ReducesEightBitFloats) {
  const Tensor values = Sample(0, 9, at::kFloat);
  const Tensor input = values.to(at::kFloat8_e4m3fn);
  ExpectReduction(ReduceOp::SUM, {input, input, input}, (values * 3).to(at::kFloat8_e4m3fn));
}

TEST(GlooBackendTest, KeepsItsHandsOffTheGapsBetweenElements) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    const Tensor sum = Sample(0, 100, at::kFloat) * 3 + 3;
    Tensors tensors = {WithGaps(Sample(rank, 100, at::kFloat))};
    gloo->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], sum));
    EXPECT_TRUE(GapsAreUntouched(tensors[0]));

    tensors = {WithGaps(Sample(rank, 100, at::kFloat))};
    gloo->reduce(tensors)->wait();
    if (rank == 0) {
      EXPECT_TRUE(at::equal(tensors[0], sum));
    }
    EXPECT_TRUE(GapsAreUntouched(tensors[0]));

    // Gaps on one rank only are nobody else's business.
    tensors = {rank == 1 ? WithGaps(Sample(rank, 100, at::kFloat)) : Sample(rank, 100, at::kFloat)};
    gloo->broadcast(tensors, {.rootRank = 1})->wait();
    EXPECT_TRUE(at::equal(tensors[0], Sample(1, 100, at::kFloat)));

    std::vector<Tensors> inputs;
    if (rank == 0) inputs = {{WithGaps(sum), WithGaps(sum + 1), WithGaps(sum + 2)}};
    Tensors outputs = {WithGaps(at::zeros({100}))};
    gloo->scatter(outputs, inputs)->wait();
    EXPECT_TRUE(at::equal(outputs[0], sum + rank));
    EXPECT_TRUE(GapsAreUntouched(outputs[0]));
  });
}

TEST(GlooBackendTest, GathersMessagesOfDifferentSizes) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    Tensors inputs = {Sample(rank, 10 * rank, at::kFloat)};  // none from rank 0
    std::vector<Tensors> outputs(1);
    for (int peer = 0; peer < kRanks; ++peer) outputs[0].push_back(at::zeros({10 * peer}));
    auto work = gloo->allgather(outputs, inputs);
    work->wait();
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_TRUE(at::equal(outputs[0][peer], Sample(peer, 10 * peer, at::kFloat)));
    }
    EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 3u);
  });
}

TEST(GlooBackendTest, AllToAllTakesListsOfDifferentSizes) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    Tensors inputs;
    Tensors outputs;
    for (int peer = 0; peer < kRanks; ++peer) {
      inputs.push_back(at::full({rank + 2 * peer}, 10 * rank + peer, at::kInt));
      outputs.push_back(at::zeros({peer + 2 * rank}, at::kInt));
    }
    gloo->alltoall(outputs, inputs)->wait();
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_TRUE(
          at::equal(outputs[peer], at::full({peer + 2 * rank}, 10 * peer + rank, at::kInt)));
    }
  });
}

TEST(GlooBackendTest, LeavesWritesToItsOwnThread) {
  std::promise<void> started;
  std::shared_future<void> start = started.get_future().share();
  RunRanks([&](int rank, const BackendPtr& gloo) {
    Tensors tensors = {Sample(rank, 100, at::kShort)};
    if (rank != 0) start.wait();
    auto work = gloo->allreduce(tensors);
    if (rank == 0) {
      EXPECT_FALSE(work->isCompleted()) << "nobody else has begun";
      started.set_value();
    }
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->retrieveOpType(), c10d::OpType::ALLREDUCE);
    EXPECT_TRUE(SameBytes(work->result()[0], (Sample(0, 100, at::kInt) * 3 + 3).to(at::kShort)));
    EXPECT_TRUE(work->getFuture()->value().toTensorVector()[0].is_same(tensors[0]));
  });
}

TEST(GlooBackendTest, WritesToLeavesThatRequireGradients) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    Tensors tensors = {WithGaps(Sample(rank, 10, at::kFloat)).requires_grad_(true)};
    gloo->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0].detach(), Sample(0, 10, at::kFloat) * 3 + 3));
    EXPECT_TRUE(tensors[0].is_leaf());
  });
}

TEST(GlooBackendTest, ReduceScatterHasAFuture) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    Tensor input = Sample(rank, 30, at::kFloat);
    Tensor output = at::zeros({10});
    auto future = gloo->reduce_scatter_single(output, input)->getFuture();
    future->wait();
    EXPECT_TRUE(at::equal(future->value().toTensorVector()[0],
                          (Sample(0, 30, at::kFloat) * 3 + 3).narrow(0, 10 * rank, 10)));
  });
}

TEST(GlooBackendTest, AMissingRankIsAnErrorOfWorkAndFuture) {
  std::promise<void> failed;
  std::atomic<int> left = kRanks - 1, timed_out = 0;
  RunRanks(
      [&](int rank, const BackendPtr& gloo) {
        if (rank == 0) {
          failed.get_future().wait();  // holds its connections open until the others have given up
          return;
        }
        Tensors tensors = {Sample(rank, 10, at::kShort)};
        auto work = gloo->allreduce(tensors);
        absl::Status status = CatchStatus("", [&] { work->wait(); });
        // The first one that gives up closes its connections, which may end the wait of the other.
        EXPECT_FALSE(status.ok());
        timed_out += absl::IsDeadlineExceeded(status);
        // The watch may give a wait up a moment before Gloo's own thread does.
        while (!work->isCompleted()) std::this_thread::yield();
        EXPECT_FALSE(work->isSuccess());
        EXPECT_TRUE(work->getFuture()->hasError());
        if (--left == 0) failed.set_value();
      },
      absl::Seconds(3));  // also the time to connect
  EXPECT_GE(timed_out, 1);
}

// A group without the watch, which has means of its own.
BackendPtr PlainGloo(const launchers::Rank& rank, const Group& group,
                     const std::string& interfaces = "") {
  BackendOptions options;
  options.group.interface = interfaces;
  options.store = c10::make_intrusive<c10d::PrefixStore>("unwatched", group.store);
  options.rank = rank;
  return *BackendRegistry::Find("gloo")->create(options);
}

TEST(GlooBackendTest, AbortEndsWaitsForTheLivingWhereverTheDeadAre) {
  for (const int dead : {0, 2}) {
    std::promise<void> died, ended;
    std::shared_future<void> death = died.get_future(), end = ended.get_future();
    RunRankThreads(kRanks, "gloo", [&](const launchers::Rank& rank, const Group& group) {
      BackendPtr gloo = PlainGloo(rank, group);
      group.process_group->barrier()->wait();
      const int silent = 2 - dead;
      if (rank.rank == dead) {
        gloo.reset();
        died.set_value();
      } else if (rank.rank == silent) {
        end.wait();
      } else {
        const absl::Cleanup release = [&ended] { ended.set_value(); };
        death.wait();
        Tensors tensors = {Sample(0, 10, at::kFloat)};
        // From here on the connection is known to be closed.
        EXPECT_FALSE(CatchStatus("", [&] { gloo->recv(tensors, dead, /*tag=*/1)->wait(); }).ok());
        auto work = gloo->recv(tensors, silent, /*tag=*/1);
        gloo->abort();
        const absl::Time aborted = absl::Now();
        EXPECT_FALSE(CatchStatus("", [&] { work->wait(std::chrono::seconds(10)); }).ok());
        EXPECT_LT(absl::Now() - aborted, absl::Seconds(5));
      }
    });
  }
}

TEST(GlooBackendTest, AbortEndsAMonitoredBarrier) {
  std::promise<void> ended;
  std::shared_future<void> end = ended.get_future();
  RunRankThreads(kRanks, "gloo", [&](const launchers::Rank& rank, const Group& group) {
    const BackendPtr gloo = PlainGloo(rank, group);
    group.process_group->barrier()->wait();
    if (rank.rank != 1) return end.wait();
    const absl::Cleanup release = [&ended] { ended.set_value(); };
    std::thread aborts([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      gloo->abort();
    });
    const absl::Time began = absl::Now();
    EXPECT_FALSE(
        CatchStatus("", [&] { gloo->monitoredBarrier(c10d::BarrierOptions(), false); }).ok());
    EXPECT_LT(absl::Now() - began, absl::Seconds(10));
    aborts.join();
  });
}

// Gloo takes one after the other for the calls, and the tag's number for messages.
TEST(GlooBackendTest, SeveralInterfacesShareTheCallsAndAreAborted) {
  std::promise<void> ended;
  std::shared_future<void> end = ended.get_future();
  RunRankThreads(kRanks, "gloo", [&](const launchers::Rank& rank, const Group& group) {
    const BackendPtr gloo = PlainGloo(rank, group, "lo, lo");
    for (int call = 0; call < 4; ++call) {
      Tensors tensors = {Sample(rank.rank, 10, at::kFloat)};
      gloo->allreduce(tensors)->wait();
      EXPECT_TRUE(at::equal(tensors[0], at::arange(10).remainder(5) * kRanks + 6.0f)) << call;
    }
    gloo->monitoredBarrier(c10d::BarrierOptions(), /*wait_all_ranks=*/true);
    if (rank.rank != 1) return end.wait();
    const absl::Cleanup release = [&ended] { ended.set_value(); };
    Tensors one = {at::zeros({1})}, two = {at::zeros({1})};
    auto on_first = gloo->recv(one, 0, /*tag=*/2), on_second = gloo->recv(two, 0, /*tag=*/3);
    gloo->abort();
    const absl::Time aborted = absl::Now();
    for (const auto& work : {on_first, on_second}) {
      EXPECT_FALSE(CatchStatus("", [&] { work->wait(std::chrono::seconds(20)); }).ok());
    }
    EXPECT_LT(absl::Now() - aborted, absl::Seconds(15));
  });
}

TEST(GlooBackendTest, RanksWithDifferentNumbersOfInterfacesAreTold) {
  RunRankThreads(kRanks, "gloo", [&](const launchers::Rank& rank, const Group& group) {
    BackendOptions options;
    options.group.interface = rank.rank == 2 ? "lo,lo" : "lo";
    options.store = c10::make_intrusive<c10d::PrefixStore>("unwatched", group.store);
    options.rank = rank;
    const absl::Status status = BackendRegistry::Find("gloo")->create(options).status();
    EXPECT_TRUE(
        absl::StrContains(status.message(), "rank 0 uses 1 network interfaces, and rank 2 uses 2"))
        << status;
  });
}

TEST(GlooBackendTest, AReceiveFromAnyRankTakesNoMessageOfAMonitoredBarrier) {
  std::promise<void> first_is_in;
  std::shared_future<void> go = first_is_in.get_future();
  RunRankThreads(kRanks, "gloo", [&](const launchers::Rank& rank, const Group& group) {
    const BackendPtr gloo = PlainGloo(rank, group);
    // c10d's barriers count from 0, with two tags each.
    constexpr int kTag = 0;
    Tensors tensors = {at::full({1}, rank.rank, at::kInt)};
    if (rank.rank == 0) {
      Tensors other = {at::zeros({1}, at::kInt)};
      // Destroyed after an exception, it lets rank 2 go on as well.
      std::promise<void> mine = std::move(first_is_in);
      auto one = gloo->recvAnysource(tensors, kTag);
      auto two = gloo->recvAnysource(other, kTag);
      one->wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      mine.set_value();
      two->wait();
      EXPECT_EQ(one->sourceRank() + two->sourceRank(), 1 + 2);
      EXPECT_EQ(tensors[0].item<int>(), one->sourceRank());
      EXPECT_EQ(other[0].item<int>(), two->sourceRank());
    } else {
      if (rank.rank == 2) go.wait();
      gloo->send(tensors, 0, kTag)->wait();
    }
    gloo->monitoredBarrier(c10d::BarrierOptions(), /*wait_all_ranks=*/false);
    EXPECT_FALSE(CatchStatus("", [&] {
                   gloo->send(tensors, (rank.rank + 1) % kRanks, std::numeric_limits<int>::max());
                 }).ok());
  });
}

TEST(GlooBackendTest, SplitsIntoGroupsOfTheSameKind) {
  RunRankThreads(kRanks, "gloo", [](const launchers::Rank& rank, const Group& group) {
    const BackendPtr gloo = group.process_group->getBackend(c10::kCPU);
    const BackendPtr half =
        gloo->split(c10::make_intrusive<c10d::PrefixStore>("split", group.store), {2, 0},
                    gloo->getBackendOptions());
    if (rank.rank == 1) {
      EXPECT_EQ(half, nullptr);
      return;
    }
    EXPECT_EQ(half->getRank(), rank.rank == 2 ? 0 : 1);
    Tensors tensors = {Sample(rank.rank, 10, at::kShort)};
    half->allreduce(tensors)->wait();
    EXPECT_TRUE(SameBytes(tensors[0], (Sample(0, 10, at::kInt) * 2 + 2).to(at::kShort)));
  });
}

}  // namespace
}  // namespace ddp::backends::gloo
