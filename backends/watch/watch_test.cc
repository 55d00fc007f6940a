// Ranks as threads over watched gloo: the errors that callers see for each kind of failure.

#include "backends/watch/watch.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "base/threads_testing.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::watch {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using absl::StrContains;
using testing::TestWithParam;
using testing::Values;

constexpr absl::Duration kTimeout = absl::Seconds(120);  // of a collective: longer than any test
constexpr absl::Duration kSoon = absl::Seconds(20);  // far less than kTimeout, far more than needed

// Collects what is logged during its lifetime.
class Log : public absl::LogSink {
 public:
  Log() { absl::AddLogSink(this); }
  ~Log() override { absl::RemoveLogSink(this); }
  void Send(const absl::LogEntry& entry) override {
    std::lock_guard<std::mutex> lock(mutex_);
    lines_.emplace_back(entry.text_message());
  }
  std::vector<std::string> LinesWith(absl::string_view text) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> found;
    for (const std::string& line : lines_) {
      if (StrContains(line, text)) found.push_back(line);
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

at::Tensor Ones(int64_t n, c10::ScalarType dtype = at::kFloat) { return at::full({n}, 1, dtype); }

void AllReduce(const BackendPtr& backend, const at::Tensor& tensor,
               const c10d::AllreduceOptions& options = {}) {
  std::vector<at::Tensor> tensors = {tensor};
  backend->allreduce(tensors, options)->wait();
}

void Barrier(const BackendPtr& backend) { backend->barrier()->wait(); }

void Broadcast(const BackendPtr& backend, const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend->broadcast(tensors, options)->wait();
}

class Ranks {
 public:
  explicit Ranks(int size, WatchOptions options = {}) : size_(size), options_(options) {}

  using Body = std::function<void(int rank, BackendPtr& backend)>;

  // The error that `body` threw on each rank; empty: none.
  std::vector<std::string> Run(const Body& body) {
    std::vector<std::string> errors(size_);
    RunBackendThreads(
        size_,
        [&](BackendOptions options) -> absl::StatusOr<BackendPtr> {
          const auto store = options.store;
          options.store = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
          DDP_ASSIGN_OR_RETURN(BackendPtr gloo, BackendRegistry::Find("gloo")->create(options));
          return Watch(std::move(gloo), c10::make_intrusive<c10d::PrefixStore>("watch", store),
                       options_);
        },
        [&](int rank, BackendPtr& backend) {
          errors[rank] = ErrorOf([&] { body(rank, backend); });
        },
        kTimeout);
    return errors;
  }

  static std::string ErrorOf(const std::function<void()>& body) {
    try {
      body();
      return "";
    } catch (const std::exception& error) {
      return ExceptionMessage(error);
    }
  }

 private:
  const int size_;
  const WatchOptions options_;
};

TEST(WatchTest, AHealthyGroupReportsNothing) {
  Log log;
  const auto errors = Ranks(3).Run([](int rank, BackendPtr& backend) {
    EXPECT_EQ(backend->getBackendName(), "gloo");
    for (int i = 0; i < 600; ++i) {
      at::Tensor tensor = at::full({5}, rank + i, at::kFloat);
      AllReduce(backend, tensor);
      ASSERT_TRUE(at::equal(tensor, at::full({5}, 3.0f * i + 3, at::kFloat)));
    }
    std::vector<std::vector<at::Tensor>> tensors(40);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& one : tensors) {
      one = {Ones(7)};
      works.push_back(backend->allreduce(one));
    }
    for (int i = 39; i >= 0; --i) {
      works[i]->wait();
      EXPECT_TRUE(works[i]->isCompleted());
      EXPECT_TRUE(works[i]->isSuccess());
      EXPECT_EQ(works[i]->exception(), nullptr);
    }
    std::vector<at::Tensor> last = {Ones(7)};
    auto future = backend->allreduce(last)->getFuture();  // the Work itself is dropped
    future->wait();
    EXPECT_FALSE(future->hasError());
    EXPECT_TRUE(at::equal(future->value().toTensorVector()[0], at::full({7}, 3, at::kFloat)));
    Barrier(backend);
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
  EXPECT_TRUE(log.LinesWith("gloo").empty());
}

// ---- mismatches

struct Mismatch {
  std::string name;
  std::function<void(const BackendPtr&)> usual;  // what ranks 0 and 2 do
  std::function<void(const BackendPtr&)> other;  // what rank 1 does
  std::string usual_text;
  std::string other_text;
};

c10d::AllreduceOptions With(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

class MismatchTest : public TestWithParam<Mismatch> {};

// Gloo hangs in some of these and returns wrong results in others; both become errors.
TEST_P(MismatchTest, IsAnErrorWithBothSidesOnAllRanks) {
  const Mismatch& mismatch = GetParam();
  const auto errors = Ranks(3).Run([&](int rank, BackendPtr& backend) {
    AllReduce(backend, Ones(4));
    (rank == 1 ? mismatch.other : mismatch.usual)(backend);
    const absl::Time end = absl::Now() + kSoon;
    while (absl::Now() < end) AllReduce(backend, Ones(4));
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(StrContains(errors[rank], absl::StrCat("rank ", rank, ": "))) << errors[rank];
    // This part names rank 0 alone if rank 2 answered too late.
    EXPECT_TRUE(StrContains(errors[rank], absl::StrCat("ranks 0, 2: #2 ", mismatch.usual_text)) ||
                StrContains(errors[rank], absl::StrCat("rank 0: #2 ", mismatch.usual_text)))
        << errors[rank];
    EXPECT_TRUE(StrContains(errors[rank], absl::StrCat("rank 1: #2 ", mismatch.other_text)))
        << errors[rank];
  }
}

const Mismatch kMismatches[] = {
    {"operation", [](const BackendPtr& backend) { AllReduce(backend, Ones(1000)); },
     [](const BackendPtr& backend) { Broadcast(backend, Ones(1000), 0); },
     "allreduce(sum) float32 [1000]", "broadcast(root 0) float32 [1000]"},
    {"reduce_op", [](const BackendPtr& backend) { AllReduce(backend, Ones(1000)); },
     [](const BackendPtr& backend) { AllReduce(backend, Ones(1000), With(c10d::ReduceOp::MAX)); },
     "allreduce(sum) float32 [1000]", "allreduce(max) float32 [1000]"},
    {"dtype", [](const BackendPtr& backend) { AllReduce(backend, Ones(1000)); },
     [](const BackendPtr& backend) { AllReduce(backend, Ones(1000, at::kInt)); },
     "allreduce(sum) float32 [1000]", "allreduce(sum) int32 [1000]"},
    {"numel", [](const BackendPtr& backend) { Broadcast(backend, Ones(1000), 0); },
     [](const BackendPtr& backend) { Broadcast(backend, Ones(1001), 0); },
     "broadcast(root 0) float32 [1000]", "broadcast(root 0) float32 [1001]"},
    {"root", [](const BackendPtr& backend) { Broadcast(backend, Ones(1000), 0); },
     [](const BackendPtr& backend) { Broadcast(backend, Ones(1000), 1); },
     "broadcast(root 0) float32 [1000]", "broadcast(root 1) float32 [1000]"},
    {"order",
     [](const BackendPtr& backend) {
       AllReduce(backend, Ones(1000));
       Barrier(backend);
     },
     [](const BackendPtr& backend) {
       Barrier(backend);
       AllReduce(backend, Ones(1000));
     },
     "allreduce(sum) float32 [1000]", "barrier"},
};

INSTANTIATE_TEST_SUITE_P(All, MismatchTest, testing::ValuesIn(kMismatches),
                         [](const auto& info) { return info.param.name; });

TEST(WatchTest, AFutureFailsWithBothSides) {
  const auto errors = Ranks(2).Run([](int rank, BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {Ones(1000)};
    if (rank == 1) return Broadcast(backend, tensors[0], 1);
    auto future = backend->allreduce(tensors)->getFuture();
    future->waitAndThrow();
  });
  EXPECT_TRUE(StrContains(errors[0], "rank 1: #1 broadcast(root 1)")) << errors[0];
  EXPECT_TRUE(StrContains(errors[0], "rank 0: #1 allreduce(sum) float32 [1000]")) << errors[0];
}

TEST(WatchTest, AfterAMismatchTheGroupRefusesAllCallsAndANewOneWorks) {
  const auto errors = Ranks(2).Run([](int rank, BackendPtr& backend) {
    const auto mismatched = [&] { rank == 0 ? AllReduce(backend, Ones(3)) : Barrier(backend); };
    EXPECT_TRUE(StrContains(Ranks::ErrorOf(mismatched), "rank 1: #1 barrier"));
    const std::string again = Ranks::ErrorOf([&] { AllReduce(backend, Ones(3)); });
    EXPECT_TRUE(StrContains(again, "rank 1: #1 barrier")) << again;
    std::vector<at::Tensor> tensors = {Ones(3)};
    EXPECT_TRUE(StrContains(Ranks::ErrorOf([&] { backend->send(tensors, 1 - rank, 0); }),
                            "rank 1: #1 barrier"));
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_EQ(Ranks(2).Run([](int, BackendPtr& backend) { AllReduce(backend, Ones(3)); }),
            std::vector<std::string>(2));
}

// ---- stalls

TEST(WatchTest, ASlowRankIsReportedOnceAndWaitedFor) {
  Log log;
  std::atomic<bool> reported = false;
  const auto errors = Ranks(3, {.stall = absl::Seconds(1)}).Run([&](int rank, BackendPtr& backend) {
    AllReduce(backend, Ones(4));
    if (rank == 2) {
      // Also for a time in which it might be reported again.
      const absl::Time begin = absl::Now();
      while (absl::Now() < begin + (reported ? absl::Seconds(3) : kSoon)) {
        reported = reported || !log.LinesWith("has waited").empty();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      EXPECT_TRUE(reported);
    }
    at::Tensor tensor = Ones(1000);
    AllReduce(backend, tensor);
    EXPECT_TRUE(at::equal(tensor, at::full({1000}, 3, at::kFloat)));
    AllReduce(backend, Ones(4));
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
  const std::vector<std::string> lines = log.LinesWith("has waited");
  ASSERT_EQ(lines.size(), 1);
  EXPECT_TRUE(StrContains(lines[0],
                          "in #2 allreduce(sum) float32 [1000]: reached by ranks 0, 1; "
                          "not by rank 2 (last call #1 allreduce(sum) float32 [4], "))
      << lines[0];
}

TEST(WatchTest, NoReportWhereStallsAreOff) {
  Log log;
  const auto errors =
      Ranks(2, {.stall = absl::ZeroDuration()}).Run([&](int rank, BackendPtr& backend) {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        AllReduce(backend, Ones(4));
      });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_TRUE(log.LinesWith("has waited").empty());
}

TEST(WatchTest, ARankThatLeavesIsNamed) {
  const auto errors = Ranks(3).Run([](int rank, BackendPtr& backend) {
    AllReduce(backend, Ones(4));
    if (rank != 1) AllReduce(backend, Ones(1000));
  });
  EXPECT_EQ(errors[1], "");
  for (int rank : {0, 2}) {
    EXPECT_TRUE(StrContains(errors[rank],
                            "rank 1 left the group after #1 allreduce(sum) float32 "
                            "[4]"))
        << errors[rank];
    EXPECT_TRUE(StrContains(errors[rank], "#2 allreduce(sum) float32 [1000] failed"))
        << errors[rank];
  }
}

TEST(WatchTest, AReceiveThatNobodySendsToIsReported) {
  Log log;
  std::atomic<bool> reported = false;
  const auto errors = Ranks(2, {.stall = absl::Seconds(1)}).Run([&](int rank, BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {Ones(10)};
    if (rank == 0) {
      backend->recv(tensors, 1, 5)->wait();
      return;
    }
    const absl::Time end = absl::Now() + kSoon;
    while (!reported && absl::Now() < end) {
      reported = !log.LinesWith("has waited").empty();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    backend->send(tensors, 0, 5)->wait();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  ASSERT_EQ(log.LinesWith("has waited").size(), 1);
  EXPECT_TRUE(StrContains(log.LinesWith("has waited")[0],
                          "in recv(from rank 1) float32 [10], receive 1 from rank 1, which has "
                          "called 0 sends to rank 0"))
      << log.LinesWith("has waited")[0];
}

// ---- not a mismatch

TEST(WatchTest, MessagesAreNotCompared) {
  const auto errors = Ranks(3).Run([](int rank, BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {Ones(10)};
    for (int i = 0; i < 5 && rank != 2; ++i) {
      rank == 0 ? backend->send(tensors, 1, i)->wait() : backend->recv(tensors, 0, i)->wait();
    }
    AllReduce(backend, Ones(4));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));  // time for one or two comparisons
    AllReduce(backend, Ones(4));
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(WatchTest, ARefusedCallIsNotCounted) {
  const auto errors = Ranks(2).Run([](int rank, BackendPtr& backend) {
    if (rank == 0) {
      std::vector<at::Tensor> none;
      const std::string error = Ranks::ErrorOf([&] { backend->allreduce(none); });
      EXPECT_FALSE(error.empty());
      EXPECT_FALSE(StrContains(error, "failed:")) << error;
    }
    for (int i = 0; i < 3; ++i) {
      AllReduce(backend, Ones(4));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(WatchTest, UnequalPartsAreLegalInAllToAll) {
  const auto errors = Ranks(2).Run([](int rank, BackendPtr& backend) {
    // Rank 0 sends 1 and 2 elements, rank 1 sends 3 and 4.
    for (int i = 0; i < 3; ++i) {
      std::vector<int64_t> in = {2 * rank + 1, 2 * rank + 2};  // moved from by gloo
      std::vector<int64_t> out = {rank + 1, rank + 3};
      at::Tensor input = Ones(in[0] + in[1]);
      at::Tensor output = Ones(out[0] + out[1]);
      backend->all_to_all_single(output, input, out, in)->wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// ---- lifetime

TEST(WatchTest, DestroyedWithWorkInFlight) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works(2);
  std::vector<std::vector<at::Tensor>> tensors = {{Ones(100)}, {Ones(100)}};
  std::atomic<bool> go = false;
  const auto errors = Ranks(2).Run([&](int rank, BackendPtr& backend) {
    if (rank == 1) {
      while (!go) std::this_thread::yield();
      return;
    }
    works[0] = backend->allreduce(tensors[0]);
    auto dropped = backend->allreduce(tensors[1]);
    dropped.reset();
    go = true;
    backend.reset();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_NE(Ranks::ErrorOf([&] { works[0]->wait(); }), "");
}

TEST(WatchTest, AnAbortEndsWaits) {
  std::atomic<bool> aborted = false;
  const auto errors = Ranks(2).Run([&](int rank, BackendPtr& backend) {
    if (rank == 1) {
      while (!aborted) std::this_thread::yield();
      return;
    }
    std::vector<at::Tensor> tensors = {Ones(100)};
    auto work = backend->allreduce(tensors);
    std::thread aborter([&] { backend->abort(); });
    const std::string error = Ranks::ErrorOf([&] { work->wait(); });
    EXPECT_TRUE(StrContains(error, "this rank has aborted the group")) << error;
    aborter.join();
    EXPECT_TRUE(StrContains(Ranks::ErrorOf([&] { AllReduce(backend, Ones(1)); }), "aborted"));
    backend.reset();
    aborted = true;
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// The waits end also where all have made the call, and Gloo has a send queued that it does not fail
// with the connection. The errors are c10d's: callers tell them from errors of their own by the
// type.
TEST(WatchTest, AnAbortByOneRankEndsTheWaitsOfAll) {
  for (int round = 0; round < 10; ++round) {
    const absl::Time start = absl::Now();
    const auto errors = Ranks(3).Run([&](int rank, BackendPtr& backend) {
      AllReduce(backend, Ones(1));
      std::vector<at::Tensor> tensors = {Ones(1 << 20)};
      auto work = backend->allreduce(tensors);
      if (rank == 1) {
        absl::SleepFor(absl::Microseconds(200 * round));
        backend->abort();
        return;
      }
      try {
        work->wait();
      } catch (const c10::DistBackendError&) {
        // wait() throws unless the Work was completed before.
      }
    });
    EXPECT_EQ(errors, std::vector<std::string>(3));
    ASSERT_LT(absl::Now() - start, kSoon);
  }
}

TEST(WatchTest, SubgroupsAreWatched) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = Ranks(4).Run([&](int rank, BackendPtr& backend) {
    ASSERT_TRUE(backend->supportsSplitting());
    const std::vector<int> ranks = rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
    BackendPtr half = backend->split(
        c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("half/", rank % 2), store), ranks,
        backend->getBackendOptions());
    ASSERT_TRUE(half);
    EXPECT_EQ(half->getSize(), 2);
    AllReduce(half, Ones(5));
    // The two halves may make different calls; a mismatch is that ranks 1 and 3 differ.
    rank == 3 ? Barrier(half) : AllReduce(half, Ones(6));
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[2], "");
  for (int rank : {1, 3}) {
    EXPECT_TRUE(
        StrContains(errors[rank], "rank 0: #2 allreduce(sum) float32 [6]; rank 1: #2 barrier"))
        << errors[rank];
  }
}

TEST(WatchTest, SeveralGroupsInSeveralThreads) {
  RunThreads(2, [](int group) {
    const auto errors = Ranks(2).Run([group](int, BackendPtr& backend) {
      for (int i = 0; i < 200; ++i) AllReduce(backend, Ones(group + i + 1));
    });
    EXPECT_EQ(errors, std::vector<std::string>(2));
  });
}

}  // namespace
}  // namespace ddp::backends::watch
