// What every CPU backend must do, run for each that is linked in: ranks as threads over one store.

#include <atomic>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/allclose.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/backend.h"
#include "backends/rank_threads.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Backends that run without special hardware.
std::vector<std::string> CpuBackends() {
  std::vector<std::string> names;
  for (const std::string& name : BackendRegistry::Names()) {
    const BackendEntry entry = *BackendRegistry::Find(name);
    // mpi, say, has ranks only under mpirun, where backends/mpi tries it.
    if (entry.available != nullptr && !entry.available().ok()) continue;
    const std::vector<std::string>& devices = entry.device_types;
    if (std::find(devices.begin(), devices.end(), "cpu") != devices.end()) names.push_back(name);
  }
  return names;
}

class ConformanceTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  int world_size() const { return std::get<1>(GetParam()); }

  // Runs `body` as each rank, with the backend that serves it.
  void RunRanks(const std::function<void(int rank, const BackendPtr& backend)>& body,
                absl::Duration timeout = absl::Seconds(60)) {
    RunRankThreads(
        world_size(), std::get<0>(GetParam()),
        [&](const launchers::Rank& rank, const Group& group) {
          body(rank.rank, group.process_group->getBackend(c10::kCPU));
        },
        timeout);
  }
};

// Values that differ by rank and position, small enough to be exact in every dtype.
at::Tensor Sample(int rank, int64_t n, c10::ScalarType dtype) {
  return (at::arange(n, at::kLong).remainder(5) + rank).to(dtype);
}

constexpr c10::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                       at::kInt,   at::kLong,   at::kChar};
constexpr int64_t kSizes[] = {1, 7, 1000, 100003};

TEST_P(ConformanceTest, AllReduceSums) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    for (c10::ScalarType dtype : kDtypes) {
      for (int64_t n : kSizes) {
        std::vector<at::Tensor> tensors = {Sample(rank, n, dtype)};
        backend->allreduce(tensors)->wait();
        at::Tensor expected = at::zeros({n}, dtype);
        for (int peer = 0; peer < world_size(); ++peer) expected += Sample(peer, n, dtype);
        EXPECT_TRUE(at::equal(tensors[0], expected)) << dtype << " x " << n;
      }
    }
  });
}

TEST_P(ConformanceTest, AllReduceIsBitIdenticalOnAllRanks) {
  std::vector<at::Tensor> results(world_size());
  RunRanks([&](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {(at::arange(10007, at::kFloat) * 0.37f + 1.0f / (rank + 3))};
    backend->allreduce(tensors)->wait();
    results[rank] = tensors[0];
  });
  for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0]));
}

TEST_P(ConformanceTest, BroadcastCopiesFromEveryRoot) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    for (int root = 0; root < world_size(); ++root) {
      std::vector<at::Tensor> tensors = {Sample(rank, 1001, at::kFloat)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      backend->broadcast(tensors, options)->wait();
      EXPECT_TRUE(at::equal(tensors[0], Sample(root, 1001, at::kFloat)));
    }
  });
}

TEST_P(ConformanceTest, AllGatherCollectsInRankOrder) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> inputs = {Sample(rank, 513, at::kLong)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int peer = 0; peer < world_size(); ++peer) {
      outputs[0].push_back(at::empty({513}, at::kLong));
    }
    backend->allgather(outputs, inputs)->wait();
    for (int peer = 0; peer < world_size(); ++peer) {
      EXPECT_TRUE(at::equal(outputs[0][peer], Sample(peer, 513, at::kLong)));
    }
  });
}

TEST_P(ConformanceTest, ReduceScatterGivesEachRankItsPart) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    std::vector<std::vector<at::Tensor>> inputs(1);
    for (int peer = 0; peer < world_size(); ++peer) {
      inputs[0].push_back(at::full({64}, rank * 10 + peer, at::kFloat));
    }
    std::vector<at::Tensor> outputs = {at::empty({64}, at::kFloat)};
    backend->reduce_scatter(outputs, inputs)->wait();
    float expected = 0;
    for (int peer = 0; peer < world_size(); ++peer) expected += peer * 10 + rank;
    EXPECT_TRUE(at::equal(outputs[0], at::full({64}, expected, at::kFloat)));
  });
}

TEST_P(ConformanceTest, ManyInFlightFinishInAnyOrderOfWaiting) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    std::vector<std::vector<at::Tensor>> tensors(20);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 20; ++i) {
      tensors[i] = {at::full({100 + i}, rank + i, at::kFloat)};
      works.push_back(backend->allreduce(tensors[i]));
    }
    for (int i = 19; i >= 0; --i) {
      works[i]->wait();
      float expected = 0;
      for (int peer = 0; peer < world_size(); ++peer) expected += peer + i;
      EXPECT_TRUE(at::equal(tensors[i][0], at::full({100 + i}, expected, at::kFloat)));
    }
  });
}

// The Reducer waits on futures, so a Work without one is of no use to DDP.
TEST_P(ConformanceTest, WorkHasAFuture) {
  RunRanks([&](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> tensors = {at::full({10}, rank, at::kFloat)};
    auto future = backend->allreduce(tensors)->getFuture();
    future->wait();
    EXPECT_FALSE(future->hasError());
    const float expected = world_size() * (world_size() - 1) / 2.0f;
    EXPECT_TRUE(at::equal(tensors[0], at::full({10}, expected, at::kFloat)));
  });
}

TEST_P(ConformanceTest, BarrierReleasesNobodyEarly) {
  std::atomic<int> arrived = 0;
  RunRanks([&](int, const BackendPtr& backend) {
    for (int round = 1; round <= 5; ++round) {
      ++arrived;
      backend->barrier()->wait();
      EXPECT_GE(arrived.load(), round * world_size());
      backend->barrier()->wait();
    }
  });
}

TEST_P(ConformanceTest, AMissingRankMakesTheOthersTimeOut) {
  std::atomic<int> timed_out = 0;
  RunRanks(
      [&](int rank, const BackendPtr& backend) {
        if (rank != 0) {
          std::vector<at::Tensor> tensors = {at::full({10}, 1, at::kFloat)};
          absl::Status status = CatchStatus("", [&] { backend->allreduce(tensors)->wait(); });
          EXPECT_FALSE(status.ok());
          ++timed_out;
        } else {
          // Holds its connections open until the others have given up.
          while (timed_out.load() < world_size() - 1) std::this_thread::yield();
        }
      },
      absl::Milliseconds(500));
}

INSTANTIATE_TEST_SUITE_P(Backends, ConformanceTest,
                         testing::Combine(testing::ValuesIn(CpuBackends()),
                                          testing::Values(2, 3, 4)),
                         [](const testing::TestParamInfo<ConformanceTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param), "_",
                                               std::get<1>(info.param));
                         });

}  // namespace
}  // namespace ddp::backends
