// What cases do not show: futures, timeouts, abort, destruction with work in flight, refusals, and
// the same bits everywhere. Ranks as threads.

#include <atomic>
#include <barrier>
#include <future>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "backends/conformance/rank_pool.h"
#include "backends/conformance/start.h"
#include "backends/conformance/traits.h"
#include "backends/watch/watch.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::conformance {
namespace {

// How long what must happen "at once" may take on a machine that does much else.
constexpr absl::Duration kAtOnce = absl::Seconds(10);
constexpr absl::Duration kNever = absl::Seconds(60);
// This is also the time in which ranks must connect to each other.
constexpr absl::Duration kShort = absl::Seconds(1);

class BehaviourTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  const Traits& traits() const { return TraitsOf(backend()); }

  bool Has(Op op) const {
    return FindGap(traits(), {.op = op, .world_size = world_size()}) == nullptr;
  }

  // Runs `body` as each rank; an error of any fails the test.
  void RunRanks(absl::Duration timeout,
                const std::function<absl::Status(int rank, Groups& groups)>& body) {
    RankPool pool(backend(), world_size(), timeout);
    const absl::Status worst = Worst(pool.Run(body));
    EXPECT_TRUE(worst.ok()) << worst;
  }
};

c10::intrusive_ptr<c10d::Work> Allreduce(c10d::Backend& backend, at::Tensor tensor) {
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  return backend.allreduce(tensors);
}

TEST_P(BehaviourTest, AllRanksGetTheSameBitsAndAgainInAnotherGroup) {
  if (!traits().reproducible) GTEST_SKIP() << backend() << " adds up in any order";
  std::vector<std::vector<uint8_t>> first(world_size());
  for (int run = 0; run < 2; ++run) {
    std::vector<std::vector<uint8_t>> results(world_size());
    RunRanks(kNever, [&](int rank, Groups& groups) {
      for (int64_t count : {5, 3001, 300007}) {
        for (c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          const Case c{.dtype = dtype, .count = count, .world_size = world_size()};
          Running running(groups.world(), traits(), c, count);
          DDP_RETURN_IF_ERROR(running.Finish());
          const std::vector<uint8_t> bytes = running.OutputBytes();
          results[rank].insert(results[rank].end(), bytes.begin(), bytes.end());
        }
      }
      return absl::OkStatus();
    });
    for (const std::vector<uint8_t>& result : results) EXPECT_TRUE(result == results[0]);
    if (run == 0) first = results;
    EXPECT_TRUE(results == first);
  }
}

// DDP's Reducer waits on futures, so a Work without one is of no use to it.
TEST_P(BehaviourTest, FuturesAndWorkTellTheEnd) {
  RunRanks(kNever, [&](int, Groups& groups) {
    uint64_t salt = 0;
    for (Op op : AllOps()) {
      ++salt;
      if (!HasFuture(op) || !Has(op)) continue;
      const Case c{.op = op, .count = 100, .mode = Mode::kAsync, .world_size = world_size()};
      Running running(groups.world(), traits(), c, salt);
      for (const auto& work : running.works()) {
        auto future = work->getFuture();
        if (future == nullptr) return absl::InternalError(absl::StrCat(Name(op), ": no future"));
        std::promise<void> called;
        future->addCallback([&](c10::ivalue::Future&) { called.set_value(); });
        future->wait();
        called.get_future().wait();
        if (future->hasError()) return absl::InternalError(future->tryRetrieveErrorMessage());
      }
      DDP_RETURN_IF_ERROR(running.Finish());
      for (const auto& work : running.works()) {
        if (!work->isCompleted() || !work->isSuccess() || work->exception() != nullptr) {
          return absl::InternalError(absl::StrCat(Name(op), ": does not say that it has ended"));
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(BehaviourTest, MessagesOfOneTagKeepTheirOrder) {
  if (!Has(Op::kSendRecv) || world_size() < 2) GTEST_SKIP() << "no messages";
  constexpr int kMessages = 100;
  RunRanks(kNever, [&](int rank, Groups& groups) {
    const int size = world_size(), previous = (rank + size - 1) % size;
    const auto message = [](int from, int i) { return at::full({1 + i % 7}, from * 1000.0f + i); };
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> sent, received;
    for (int i = 0; i < kMessages; ++i) {
      sent.push_back(message(rank, i));
      received.push_back(at::zeros({1 + i % 7}));
      std::vector<at::Tensor> in = {received.back()}, out = {sent.back()};
      works.push_back(groups.world().recv(in, previous, /*tag=*/5));
      works.push_back(groups.world().send(out, (rank + 1) % size, /*tag=*/5));
    }
    for (const auto& work : works) work->wait();
    for (int i = 0; i < kMessages; ++i) {
      if (at::equal(received[i], message(previous, i))) continue;
      return absl::DataLossError(absl::StrCat("message ", i, " is another"));
    }
    return absl::OkStatus();
  });
}

TEST_P(BehaviourTest, BarrierReleasesNobodyEarly) {
  for (Op op : {Op::kBarrier, Op::kMonitoredBarrier}) {
    if (!Has(op)) continue;
    std::atomic<int> arrived = 0;
    RunRanks(kNever, [&](int, Groups& groups) {
      const Case c{.op = op, .world_size = world_size()};
      for (int round = 1; round <= 5; ++round) {
        ++arrived;
        DDP_RETURN_IF_ERROR(groups.Run(c, 2 * round));
        if (arrived.load() < round * world_size()) return absl::InternalError("released early");
        DDP_RETURN_IF_ERROR(groups.Run(c, 2 * round + 1));
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(BehaviourTest, AMissingRankMakesTheOthersTimeOut) {
  for (Op op : AllOps()) {
    if (!Has(op)) continue;
    SCOPED_TRACE(Name(op));
    absl::Barrier* over = new absl::Barrier(world_size());
    std::vector<std::string> errors(world_size());
    RunRanks(kShort, [&](int rank, Groups& groups) {
      const Case c{.op = op, .count = 1000, .mode = Mode::kAsync, .world_size = world_size()};
      const int missing = 0;
      // The root that gives is missing; the one that takes is not.
      const uint64_t salt = op == Op::kBroadcast || op == Op::kScatter ? 0 : 7;
      absl::Status status;
      const absl::Time start = absl::Now();
      if (rank != missing) status = groups.Run(c, salt);
      const absl::Duration took = absl::Now() - start;
      // The missing rank holds its connections open until the others have given up.
      if (over->Block()) delete over;
      if (rank == missing) return absl::OkStatus();
      if (absl::IsDataLoss(status)) return status;
      const Plan plan =
          MakePlan(op, c.count, world_size(), rank, Running::Root(salt, world_size()));
      if (status.ok() && DependsOn(plan, op, rank, missing)) {
        return absl::DataLossError("a result without the missing rank");
      }
      if (took > kShort + kAtOnce) return absl::InternalError("did not give up in time");
      errors[rank] = status.ToString();
      return absl::OkStatus();
    });
    // One error has the words that PyTorch's users look for. Other ranks may see that the first one
    // gave up.
    EXPECT_TRUE(absl::StrContains(absl::StrJoin(errors, "\n"), "Timed out"))
        << absl::StrJoin(errors, "\n");
  }
}

TEST_P(BehaviourTest, AWaitWithATimeoutGivesUpAndTheWorkGoesOn) {
  absl::Notification gave_up;
  RunRanks(kNever, [&](int rank, Groups& groups) {
    if (rank == 0) {
      at::Tensor tensor = at::full({10}, 1.0f);
      auto work = Allreduce(groups.world(), tensor);
      const absl::Time start = absl::Now();
      const absl::Status status =
          CatchStatus("", [&] { work->wait(std::chrono::milliseconds(50)); });
      const absl::Duration took = absl::Now() - start;
      gave_up.Notify();
      if (status.ok()) return absl::InternalError("wait(50ms) waited for a rank that had not come");
      if (took > kAtOnce) return absl::InternalError("wait(50ms) took too long");
      // Whether it can still succeed is the backend's choice; a wrong result is none.
      const absl::Status second = CatchStatus("", [&] { work->wait(); });
      if (second.ok() && !at::equal(tensor, at::full({10}, static_cast<float>(world_size())))) {
        return absl::DataLossError("wait() returned before the sum was there");
      }
      return absl::OkStatus();
    }
    gave_up.WaitForNotification();
    at::Tensor tensor = at::full({10}, 1.0f);
    // The rank that gave up may have given up the group.
    CatchStatus("", [&] { Allreduce(groups.world(), tensor)->wait(); }).IgnoreError();
    return absl::OkStatus();
  });
}

TEST_P(BehaviourTest, AShorterTimeoutAppliesToLaterCalls) {
  absl::Barrier* over = new absl::Barrier(world_size());
  RunRanks(kNever, [&](int rank, Groups& groups) {
    c10d::Backend& world = groups.world();
    absl::Status status;
    absl::Duration took;
    if (rank != 0) {
      world.setTimeout(absl::ToChronoMilliseconds(kShort));
      const absl::Time start = absl::Now();
      status = CatchStatus("", [&] { Allreduce(world, at::zeros({1000}))->wait(); });
      took = absl::Now() - start;
    }
    if (over->Block()) delete over;
    world.abort();  // ends what is still under way
    if (rank == 0) return absl::OkStatus();
    if (status.ok()) return absl::DataLossError("wait() succeeded without rank 0");
    if (took > kShort + kAtOnce) return absl::InternalError("did not give up in time");
    return absl::OkStatus();
  });
}

TEST_P(BehaviourTest, GetErrorTellsOfAnAbort) {
  absl::Barrier* asked = new absl::Barrier(world_size());
  RunRanks(kNever, [&](int, Groups& groups) {
    c10d::Backend& world = groups.world();
    c10d::ErrorType before = c10d::ErrorType::SUCCESS;
    const absl::Status status = CatchStatus("", [&] { before = world.getError(); });
    if (asked->Block()) delete asked;
    if (!status.ok()) return status;
    world.abort();
    if (before != c10d::ErrorType::SUCCESS) return absl::InternalError("an error before it");
    if (world.getError() == c10d::ErrorType::SUCCESS) return absl::InternalError("none after it");
    return absl::OkStatus();
  });
}

// Whether c10d's own function of that name was called, which only throws.
bool IsNotSupported(const absl::Status& status) {
  return absl::StrContains(status.message(), "does not support") ||
         absl::StrContains(status.message(), "is missing implementation");
}

// A merged group has what the backend adds to c10d's: gloo sums int16.
TEST_P(BehaviourTest, MergesRanksIntoAGroupInAnotherOrder) {
  std::atomic<int> unsupported = 0;
  std::barrier over(world_size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(kNever, [&](int rank, Groups& groups) {
    c10d::Backend& world = groups.world();
    const int merged_rank = world_size() - 1 - rank;
    c10::intrusive_ptr<c10d::Backend> merged;
    const absl::Status status = CatchStatus("", [&]() -> absl::Status {
      merged = world.merge(store, world.getBackendOptions(), merged_rank, world_size());
      if (merged->getRank() != merged_rank || merged->getSize() != world_size()) {
        return absl::InternalError("another rank or size");
      }
      std::vector<at::Tensor> tensors = {at::full({10}, rank, at::kShort)};
      c10d::BroadcastOptions from_first;
      from_first.rootRank = 0;
      merged->broadcast(tensors, from_first)->wait();
      if (!at::equal(tensors[0], at::full({10}, world_size() - 1, at::kShort))) {
        return absl::DataLossError("not the first rank's");
      }
      tensors[0].fill_(2);
      merged->allreduce(tensors)->wait();
      if (!at::equal(tensors[0], at::full({10}, 2 * world_size(), at::kShort))) {
        return absl::DataLossError("not the sum");
      }
      return absl::OkStatus();
    });
    over.arrive_and_wait();  // then no rank needs the group any more
    unsupported += IsNotSupported(status);
    return IsNotSupported(status) ? absl::OkStatus() : status;
  });
  EXPECT_FALSE(unsupported > 0 && backend() == "gloo");
  if (unsupported > 0) GTEST_SKIP() << backend() << " does not merge groups";
}

TEST_P(BehaviourTest, AbortEndsAWait) {
  absl::Barrier* over = new absl::Barrier(world_size());
  RunRanks(kNever, [&](int rank, Groups& groups) {
    absl::Status status;
    absl::Duration took;
    if (rank != 0) {
      auto work = Allreduce(groups.world(), at::zeros({1000}));
      std::thread aborts([&] { groups.world().abort(); });
      const absl::Time start = absl::Now();
      status = CatchStatus("", [&] { work->wait(); });
      took = absl::Now() - start;
      aborts.join();
    }
    if (over->Block()) delete over;
    if (rank == 0) return absl::OkStatus();
    if (status.ok()) return absl::DataLossError("wait() succeeded without rank 0");
    if (took > kAtOnce) return absl::InternalError(absl::StrCat("ended late: ", status.ToString()));
    const absl::Status later =
        CatchStatus("", [&] { Allreduce(groups.world(), at::zeros({10}))->wait(); });
    if (later.ok()) return absl::DataLossError("a collective of an aborted group succeeded");
    return absl::OkStatus();
  });
}

TEST_P(BehaviourTest, AGroupDestroyedWithWorkInFlightEndsIt) {
  const absl::Duration timeout = traits().ends_when_destroyed ? kNever : kShort;
  absl::Barrier* over = new absl::Barrier(world_size());
  RunRanks(timeout, [&](int rank, Groups& groups) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> tensors;
    absl::Duration took;
    std::vector<absl::Status> ends;
    if (rank != 0) {
      for (int i = 0; i < 3; ++i) {
        tensors.push_back(at::zeros({100000}));
        works.push_back(Allreduce(groups.world(), tensors.back()));
      }
      const absl::Time start = absl::Now();
      groups.ReleaseWorld();
      for (auto& work : works) ends.push_back(CatchStatus("", [&] { work->wait(); }));
      took = absl::Now() - start;
    }
    if (over->Block()) delete over;
    for (const absl::Status& end : ends) {
      if (end.ok()) return absl::DataLossError("wait() succeeded without rank 0");
    }
    if (took > kAtOnce) return absl::InternalError("the group's end took too long");
    return absl::OkStatus();
  });
}

// Failures leave no state behind that a later group of the same process would meet.
TEST_P(BehaviourTest, AGroupMadeAnewAfterAFailureWorks) {
  RankPool pool(backend(), world_size(), kShort);
  const Case c{.count = 5000, .mode = Mode::kInFlight, .world_size = world_size()};
  for (int round = 0; round < 3; ++round) {
    absl::Barrier* over = new absl::Barrier(world_size());
    pool.Run([&](int rank, Groups& groups) {
      if (rank != round % world_size()) groups.Run(c, 1).IgnoreError();
      if (over->Block()) delete over;
      return absl::OkStatus();
    });
    pool.Reset();
    RankPool anew(backend(), world_size(), kNever);
    const absl::Status worst =
        Worst(anew.Run([&](int, Groups& groups) { return groups.Run(c, 2); }));
    EXPECT_TRUE(worst.ok()) << worst;
  }
}

// Arguments that make no sense are refused by all ranks, and the group stays of use.
TEST_P(BehaviourTest, RefusesWhatMakesNoSense) {
  RunRanks(kNever, [&](int, Groups& groups) {
    c10d::Backend& world = groups.world();
    std::vector<at::Tensor> floats = {at::ones({8})}, none;
    const auto refused = [](absl::string_view what, auto call) {
      return CatchStatus("", call).ok() ? absl::InternalError(absl::StrCat("accepted: ", what))
                                        : absl::OkStatus();
    };
    absl::Status status;
    status.Update(refused("bitwise and of floats", [&] {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::BAND;
      world.allreduce(floats, options)->wait();
    }));
    status.Update(refused("a root that is not there", [&] {
      c10d::BroadcastOptions options;
      options.rootRank = world_size();
      world.broadcast(floats, options)->wait();
    }));
    status.Update(refused("an output of the wrong size", [&] {
      at::Tensor output = at::ones({8 * world_size() + 1});
      world.all_gather_single(output, floats[0])->wait();
    }));
    status.Update(refused("an output of another dtype", [&] {
      at::Tensor output = at::ones({8 * world_size()}, at::kInt);
      world.all_gather_single(output, floats[0])->wait();
    }));
    status.Update(refused("no tensor", [&] { world.allreduce(none)->wait(); }));
    status.Update(refused("splits that do not add up", [&] {
      at::Tensor output = at::ones({8}), input = at::ones({8});
      std::vector<int64_t> splits(world_size(), 8);
      world.all_to_all_single(output, input, splits, splits)->wait();
    }));
    DDP_RETURN_IF_ERROR(status);
    return groups.Run({.count = 100, .world_size = world_size()}, 1);
  });
}

// What programs use is watched (backends/watch): if ranks make different calls, the error names
// both calls, instead of a hang or of garbage.
TEST_P(BehaviourTest, MismatchedCallsNameBothSides) {
  using Call = std::function<void(c10d::Backend & backend)>;
  const auto allreduce = [](int64_t count, c10::ScalarType dtype) -> Call {
    return [=](c10d::Backend& backend) { Allreduce(backend, at::ones({count}, dtype))->wait(); };
  };
  const Call broadcast = [](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors = {at::ones({1000})};
    backend.broadcast(tensors)->wait();
  };
  struct Mismatch {
    std::string what;
    Call first, others;
    std::string first_says, others_say;
  };
  const Mismatch mismatches[] = {
      {"operation", allreduce(1000, at::kFloat), broadcast, "allreduce", "broadcast"},
      {"dtype", allreduce(1000, at::kFloat), allreduce(1000, at::kInt), "float32", "int32"},
      {"size", allreduce(1000, at::kFloat), allreduce(1001, at::kFloat), "[1000]", "[1001]"},
  };
  for (const Mismatch& mismatch : mismatches) {
    SCOPED_TRACE(mismatch.what);
    if (!traits().survives_wrong_sizes && mismatch.what == "size") continue;
    auto store = c10::make_intrusive<c10d::HashStore>();
    absl::Barrier* over = new absl::Barrier(world_size());
    RunRanks(kNever, [&](int rank, Groups&) -> absl::Status {
      BackendOptions options;
      options.store = store;
      options.rank.rank = options.rank.local_rank = rank;
      options.rank.world_size = options.rank.local_world_size = world_size();
      options.group.timeout = absl::Seconds(20);
      DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(backend()));
      DDP_ASSIGN_OR_RETURN(auto inner, entry.create(options));
      auto watched =
          watch::Watch(inner, c10::make_intrusive<c10d::PrefixStore>("watch", options.store),
                       {.capabilities = entry.capabilities});
      allreduce(10, at::kFloat)(*watched);  // all is well so far
      const absl::Status status = CatchStatus("", [&] {
        (rank == 0 ? mismatch.first : mismatch.others)(*watched);
        // Where the backend did not mind, the program goes on, at a program's pace, and the watch
        // has a moment to compare notes.
        const absl::Time deadline = absl::Now() + kAtOnce;
        while (absl::Now() < deadline) {
          watched->barrier()->wait();
          absl::SleepFor(absl::Milliseconds(20));
        }
      });
      if (over->Block()) delete over;
      if (status.ok()) return absl::DataLossError("nobody noticed");
      if (!absl::StrContains(status.message(), mismatch.first_says) ||
          !absl::StrContains(status.message(), mismatch.others_say)) {
        return absl::InternalError(absl::StrCat("does not show both sides: ", status.ToString()));
      }
      return absl::OkStatus();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BehaviourTest,
                         testing::Combine(testing::ValuesIn(ThreadBackends()),
                                          testing::Values(2, 3)),
                         [](const testing::TestParamInfo<BehaviourTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param), "_w",
                                               std::get<1>(info.param));
                         });

}  // namespace
}  // namespace ddp::backends::conformance
