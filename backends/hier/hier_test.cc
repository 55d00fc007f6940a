#include "backends/hier/hier.h"

#include <atomic>
#include <functional>
#include <latch>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/types.h"

namespace ddp::backends::hier {
namespace {

using c10d::Backend;
using c10d::ReduceOp;
using HostNames = std::vector<std::string>;  // the host of each rank
using Body = std::function<void(int rank, Backend& backend)>;

// Small chunks and a small window, so that a few kilobytes see every stage.
HierOptions SmallChunks() {
  HierOptions options;
  options.chunk_bytes = 1024;
  options.window = 3;
  return options;
}

// Runs `body` as each rank, in a thread; an exception fails the test.
void RunRanks(const HostNames& layout, const Body& body, const HierOptions& hier = SmallChunks(),
              absl::Duration timeout = absl::Seconds(60)) {
  RunBackendThreads(
      static_cast<int>(layout.size()),
      [&](BackendOptions options) {
        options.group.hostname = "127.0.0.1";
        HierOptions own = hier;
        own.host_id = layout[options.rank.rank];
        return CreateHier(options, own);
      },
      [&](int rank, c10::intrusive_ptr<Backend>& backend) { body(rank, *backend); }, timeout);
}

const std::map<std::string, HostNames>& Layouts() {
  static const auto* layouts = new std::map<std::string, HostNames>{
      {"2x2", {"a", "a", "b", "b"}},
      {"2x2 in turns", {"a", "b", "a", "b"}},
      {"2 and 1", {"a", "a", "b"}},
      {"1 and 3", {"a", "b", "b", "b"}},
      {"3 hosts of 2", {"a", "a", "b", "b", "c", "c"}},
      {"2x4", {"a", "a", "a", "a", "b", "b", "b", "b"}},
  };
  return *layouts;
}

// Small whole numbers, different at each place and rank: their sums are exact.
at::Tensor Values(int rank, int64_t count, at::ScalarType dtype = at::kFloat) {
  return (torch::arange(count, at::kLong).add_(rank).remainder_(5).add_(rank)).to(dtype);
}

at::Tensor Sum(int ranks, int64_t count) {
  at::Tensor sum = torch::zeros({count});
  for (int rank = 0; rank < ranks; ++rank) sum += Values(rank, count);
  return sum;
}

class LayoutTest : public testing::TestWithParam<std::string> {
 protected:
  const HostNames& layout() const { return Layouts().at(GetParam()); }
  int size() const { return static_cast<int>(layout().size()); }
};
INSTANTIATE_TEST_SUITE_P(, LayoutTest,
                         testing::Values("2x2", "2x2 in turns", "2 and 1", "1 and 3",
                                         "3 hosts of 2", "2x4"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = c == ' ' ? '_' : c;
                           return name;
                         });

TEST_P(LayoutTest, AllreduceOfAllSizesAroundChunks) {
  RunRanks(layout(), [&](int rank, Backend& backend) {
    // A chunk holds 256; the last is large enough to be added up by one host in turns.
    for (int64_t count : {0, 1, 255, 256, 257, 2048, 20011}) {
      std::vector<at::Tensor> tensors = {Values(rank, count)};
      backend.allreduce(tensors, {})->wait();
      EXPECT_TRUE(tensors[0].equal(Sum(size(), count))) << count;
    }
  });
}

TEST_P(LayoutTest, LargeChunksAreAddedUpByOneHost) {
  HierOptions hier = SmallChunks();
  hier.chunk_bytes = 64 << 10;
  RunRanks(
      layout(),
      [&](int rank, Backend& backend) {
        std::vector<at::Tensor> tensors = {Values(rank, 200'003)};
        backend.allreduce(tensors, {})->wait();
        EXPECT_TRUE(tensors[0].equal(Sum(size(), 200'003)));
      },
      hier);
}

TEST_P(LayoutTest, Reductions) {
  const int64_t count = 1000;
  RunRanks(layout(), [&](int rank, Backend& backend) {
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size(); ++r) inputs.push_back(Values(r, count).add_(1));
    const at::Tensor all = torch::stack(inputs);
    const auto reduced = [&](const ReduceOp& op, at::ScalarType dtype) {
      std::vector<at::Tensor> tensors = {
          inputs[rank].to(dtype, /*non_blocking=*/false, /*copy=*/true)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      backend.allreduce(tensors, options)->wait();
      return tensors[0];
    };
    EXPECT_TRUE(reduced(ReduceOp::MIN, at::kInt).equal(std::get<0>(all.min(0)).to(at::kInt)));
    EXPECT_TRUE(reduced(ReduceOp::MAX, at::kDouble).equal(std::get<0>(all.max(0)).to(at::kDouble)));
    EXPECT_TRUE(reduced(ReduceOp::PRODUCT, at::kDouble).equal(all.to(at::kDouble).prod(0)));
    EXPECT_TRUE(reduced(ReduceOp::AVG, at::kFloat).equal(all.sum(0) / size()));
    EXPECT_TRUE(
        reduced(ReduceOp::AVG, at::kLong).equal(all.sum(0).to(at::kLong).div(size(), "trunc")));
    EXPECT_TRUE(reduced(c10d::makePreMulSum(0.5), at::kFloat).equal(all.sum(0) * 0.5));
    at::Tensor bits = all[0].to(at::kInt);
    for (int r = 1; r < size(); ++r) bits.bitwise_xor_(all[r].to(at::kInt));
    EXPECT_TRUE(reduced(ReduceOp::BXOR, at::kInt).equal(bits));
    EXPECT_TRUE(reduced(ReduceOp::SUM, at::kHalf).equal(all.sum(0).to(at::kHalf)));
    EXPECT_TRUE(reduced(ReduceOp::SUM, at::kComplexFloat).equal(all.sum(0).to(at::kComplexFloat)));
  });
}

TEST_P(LayoutTest, ReduceGoesToTheRootOnly) {
  const int64_t count = 777;
  RunRanks(layout(), [&](int rank, Backend& backend) {
    for (int root = 0; root < size(); ++root) {
      std::vector<at::Tensor> tensors = {Values(rank, count)};
      c10d::ReduceOptions options;
      options.rootRank = root;
      backend.reduce(tensors, options)->wait();
      EXPECT_TRUE(tensors[0].equal(rank == root ? Sum(size(), count) : Values(rank, count)));
    }
  });
}

TEST_P(LayoutTest, BroadcastFromEachRank) {
  RunRanks(layout(), [&](int rank, Backend& backend) {
    for (int root = 0; root < size(); ++root) {
      std::vector<at::Tensor> tensors = {Values(rank, 2000)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      backend.broadcast(tensors, options)->wait();
      EXPECT_TRUE(tensors[0].equal(Values(root, 2000))) << root;
    }
  });
}

TEST_P(LayoutTest, AllgatherInAllForms) {
  const int64_t count = 600;
  RunRanks(layout(), [&](int rank, Backend& backend) {
    std::vector<at::Tensor> expected;
    for (int r = 0; r < size(); ++r) expected.push_back(Values(r, count));
    at::Tensor input = Values(rank, count);

    at::Tensor base = torch::zeros({size() * count});
    backend.all_gather_single(base, input, {})->wait();
    EXPECT_TRUE(base.equal(torch::cat(expected)));

    // The ranks' tensors have different sizes, and the outputs are not contiguous.
    std::vector<at::Tensor> inputs = {Values(rank, 10 * rank + 300)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int r = 0; r < size(); ++r) {
      outputs[0].push_back(torch::zeros({10 * r + 300, 2}).select(1, 0));
    }
    backend.allgather(outputs, inputs, {})->wait();
    for (int r = 0; r < size(); ++r) {
      EXPECT_TRUE(outputs[0][r].equal(Values(r, 10 * r + 300)));
    }

    std::vector<at::Tensor> two_inputs = {input, input.to(at::kLong)};
    std::vector<at::Tensor> two = {torch::zeros_like(base), torch::zeros_like(base, at::kLong)};
    backend.all_gather_single_coalesced(two, two_inputs, {})->wait();
    EXPECT_TRUE(two[0].equal(base));
    EXPECT_TRUE(two[1].equal(base.to(at::kLong)));

    std::vector<std::vector<at::Tensor>> by_rank(size());
    for (auto& list : by_rank) {
      list = {torch::zeros({count}), torch::zeros({count}, at::kLong)};
    }
    backend.allgather_coalesced(by_rank, two_inputs, {})->wait();
    for (int r = 0; r < size(); ++r) {
      EXPECT_TRUE(by_rank[r][0].equal(expected[r]));
      EXPECT_TRUE(by_rank[r][1].equal(expected[r].to(at::kLong)));
    }
  });
}

TEST_P(LayoutTest, ReduceScatterInAllFormsLeavesItsInputs) {
  const int64_t count = 600;
  RunRanks(layout(), [&](int rank, Backend& backend) {
    at::Tensor input = Values(rank, size() * count);
    const at::Tensor before = input.clone();
    const at::Tensor expected = Sum(size(), size() * count).narrow(0, rank * count, count);

    at::Tensor output = torch::zeros({count});
    backend.reduce_scatter_single(output, input, {})->wait();
    EXPECT_TRUE(output.equal(expected));

    std::vector<at::Tensor> outputs = {torch::zeros({count})};
    std::vector<std::vector<at::Tensor>> inputs = {input.chunk(size())};
    c10d::ReduceScatterOptions average;
    average.reduceOp = ReduceOp::AVG;
    backend.reduce_scatter(outputs, inputs, average)->wait();
    EXPECT_TRUE(outputs[0].equal(expected / size()));

    std::vector<at::Tensor> two = {torch::zeros({count}), torch::zeros({count}, at::kLong)};
    std::vector<at::Tensor> two_inputs = {input, input.to(at::kLong)};
    backend.reduce_scatter_single_coalesced(two, two_inputs, {})->wait();
    EXPECT_TRUE(two[0].equal(expected));
    EXPECT_TRUE(two[1].equal(expected.to(at::kLong)));
    EXPECT_TRUE(input.equal(before));
  });
}

TEST_P(LayoutTest, WhatGoesThroughTheGroupOfAllRanks) {
  RunRanks(layout(), [&](int rank, Backend& backend) {
    std::vector<at::Tensor> inputs = {Values(rank, 100)};
    std::vector<std::vector<at::Tensor>> gathered;
    if (rank == 1) {
      gathered.emplace_back();
      for (int r = 0; r < size(); ++r) gathered[0].push_back(torch::zeros({100}));
    }
    c10d::GatherOptions to_one;
    to_one.rootRank = 1;
    backend.gather(gathered, inputs, to_one)->wait();
    if (rank == 1) {
      for (int r = 0; r < size(); ++r) EXPECT_TRUE(gathered[0][r].equal(Values(r, 100)));
    }

    std::vector<at::Tensor> sent, received;
    for (int r = 0; r < size(); ++r) {
      sent.push_back(torch::full({rank + 1}, 10 * rank + r));
      received.push_back(torch::full({r + 1}, -1));
    }
    backend.alltoall(received, sent, {})->wait();
    for (int r = 0; r < size(); ++r) {
      EXPECT_TRUE(received[r].equal(torch::full({r + 1}, 10 * r + rank)));
    }

    std::vector<at::Tensor> message = {Values(rank, 50)}, arrived = {torch::zeros({50})};
    auto send = backend.send(message, (rank + 1) % size(), /*tag=*/7);
    backend.recv(arrived, (rank + size() - 1) % size(), /*tag=*/7)->wait();
    send->wait();
    EXPECT_TRUE(arrived[0].equal(Values((rank + size() - 1) % size(), 50)));

    backend.barrier({})->wait();
    backend.monitoredBarrier({}, false);
  });
}

TEST_P(LayoutTest, SameBitsOnAllRanksAndFromRunToRun) {
  std::vector<at::Tensor> results(size()), again(size());
  for (std::vector<at::Tensor>* into : {&results, &again}) {
    RunRanks(layout(), [&](int rank, Backend& backend) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(rank);
      std::vector<at::Tensor> tensors = {torch::randn({30'011}, generator)};
      backend.allreduce(tensors, {})->wait();
      (*into)[rank] = tensors[0];
    });
  }
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(results[rank].equal(results[0])) << rank;
    EXPECT_TRUE(results[rank].equal(again[rank])) << rank;
  }
}

TEST(HierTest, ManyInFlightEndInOrderAndFillTheirFutures) {
  RunRanks(Layouts().at("2x2"), [&](int rank, Backend& backend) {
    std::vector<std::vector<at::Tensor>> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back({Values(rank, 100 * i)});
      works.push_back(backend.allreduce(tensors.back(), {}));
    }
    works[19]->wait();
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(works[i]->isCompleted());
      EXPECT_TRUE(works[i]->isSuccess());
      works[i]->getFuture()->waitAndThrow();
      EXPECT_TRUE(works[i]->getFuture()->value().toTensorVector()[0].equal(Sum(4, 100 * i)));
    }
  });
}

TEST(HierTest, SplitGroupsFindTheirOwnHosts) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(Layouts().at("3 hosts of 2"), [&](int rank, Backend& backend) {
    // Hosts b (both ranks) and c (one).
    auto part = backend.split(store, {2, 3, 4}, nullptr);
    ASSERT_EQ(part != nullptr, rank >= 2 && rank <= 4);
    if (part == nullptr) return;
    EXPECT_EQ(part->getBackendName(), "hier");
    EXPECT_EQ(part->getRank(), rank - 2);
    std::vector<at::Tensor> tensors = {torch::full({3}, rank)};
    part->allreduce(tensors, {})->wait();
    EXPECT_TRUE(tensors[0].equal(torch::full({3}, 9)));
  });
}

TEST(HierTest, AnyBackendCanBeTheLocalPart) {
  HierOptions hier = SmallChunks();
  hier.local = "gloo";
  RunRanks(
      Layouts().at("2 and 1"),
      [](int rank, Backend& backend) {
        std::vector<at::Tensor> tensors = {Values(rank, 2000)};
        backend.allreduce(tensors, {})->wait();
        EXPECT_TRUE(tensors[0].equal(Sum(3, 2000)));
      },
      hier);
}

TEST(HierTest, OneHostIsLocalAndSingleRanksAreCross) {
  RunRanks({"a", "a"}, [](int, Backend& backend) { EXPECT_EQ(backend.getBackendName(), "shm"); });
  RunRanks({"a", "b"}, [](int, Backend& backend) { EXPECT_EQ(backend.getBackendName(), "gloo"); });
  RunRanks({"a", "b", "b"},
           [](int, Backend& backend) { EXPECT_EQ(backend.getBackendName(), "hier"); });
}

TEST(HierTest, OneRanksFailureReachesAllAndStays) {
  RunRanks(Layouts().at("2x2"), [&](int rank, Backend& backend) {
    std::vector<at::Tensor> tensors = {Values(rank, 10)};
    backend.allreduce(tensors, {})->wait();
    if (rank == 3) {
      backend.abort();
      return;
    }
    const absl::Time began = absl::Now();
    const absl::Status status = CatchStatus("", [&] { backend.allreduce(tensors, {})->wait(); });
    EXPECT_FALSE(status.ok());
    EXPECT_LT(absl::Now() - began, absl::Seconds(10));
    // The group stays broken, and says why.
    const absl::Status later = CatchStatus("", [&] { backend.barrier({})->wait(); });
    EXPECT_TRUE(absl::StrContains(later.message(), status.message())) << later << status;
  });
}

TEST(HierTest, TimeoutNamesTheOperationThePartAndTheRank) {
  std::latch others(3);
  std::atomic<int> have_timed_out = 0;  // bit by rank
  RunRanks(
      Layouts().at("2x2"),
      [&](int rank, Backend& backend) {
        if (rank == 2) {  // it never comes
          others.wait();
          return;
        }
        std::vector<at::Tensor> tensors = {Values(rank, 10)};
        const absl::Status status =
            CatchStatus("", [&] { backend.allreduce(tensors, {})->wait(); });
        others.count_down();
        EXPECT_TRUE(absl::StrContains(status.message(), "allreduce failed")) << status;
        EXPECT_TRUE(absl::StrContains(status.message(), "part (")) << status;
        // Of ranks 0 and 1, the one that times out first ends the wait of the other.
        const bool timed_out = absl::StrContains(status.message(), "Timed out after 5s");
        const bool told = absl::StrContains(status.message(), "aborted the group");
        EXPECT_TRUE(timed_out || (told && rank != 3)) << status;
        if (timed_out) have_timed_out |= 1 << rank;
        EXPECT_TRUE(absl::StrContains(status.message(), "on host")) << status;
      },
      SmallChunks(), absl::Seconds(5));  // also the time to connect
  EXPECT_NE(have_timed_out & 3, 0);
}

TEST_P(LayoutTest, PackedOnTheWayGradientsKeepEachBit) {
  std::vector<at::Tensor> results;
  for (Packing packing : {Packing::kNever, Packing::kAlways}) {
    HierOptions hier = SmallChunks();
    hier.chunk_bytes = 128 << 10;
    hier.packing = packing;
    results.emplace_back();
    RunRanks(
        layout(),
        [&](int rank, Backend& backend) {
          auto generator = at::make_generator<at::CPUGeneratorImpl>(rank);
          std::vector<at::Tensor> tensors = {torch::randn({200'011}, generator)};
          backend.allreduce(tensors, {})->wait();
          c10d::BroadcastOptions from_last;
          from_last.rootRank = size() - 1;
          std::vector<at::Tensor> half = {tensors[0].to(at::kBFloat16).mul_(rank)};
          backend.broadcast(half, from_last)->wait();
          EXPECT_TRUE(half[0].equal(tensors[0].to(at::kBFloat16).mul_(size() - 1)));
          if (rank == 0) results.back() = tensors[0];
        },
        hier);
  }
  EXPECT_TRUE(results[0].equal(results[1]));
}

TEST(HierTest, SenselessCallsAreRefusedAndLeaveTheGroupWell) {
  RunRanks(Layouts().at("2 and 1"), [](int rank, Backend& backend) {
    std::vector<at::Tensor> tensors = {Values(rank, 10)}, two = {tensors[0], tensors[0]};
    c10d::AllreduceOptions bitwise;
    bitwise.reduceOp = ReduceOp::BAND;
    EXPECT_THROW(backend.allreduce(tensors, bitwise), c10::Error);
    EXPECT_THROW(backend.allreduce(two, {}), c10::Error);
    c10d::BroadcastOptions from_nobody;
    from_nobody.rootRank = 3;
    EXPECT_THROW(backend.broadcast(tensors, from_nobody), c10::Error);
    backend.allreduce(tensors, {})->wait();
    EXPECT_TRUE(tensors[0].equal(Sum(3, 10)));
  });
}

TEST(HierTest, RefusesWhatMakesNoSense) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  HierOptions hier;
  hier.chunk_bytes = 1;
  EXPECT_EQ(CreateHier(options, hier).status().code(), absl::StatusCode::kInvalidArgument);
  hier = {};
  hier.cross = "hier";
  EXPECT_EQ(CreateHier(options, hier).status().code(), absl::StatusCode::kInvalidArgument);
  hier = {};
  hier.local = "no such";
  EXPECT_EQ(CreateHier(options, hier).status().code(), absl::StatusCode::kNotFound);
}

// The options reach the backend through the registry, as a program's do.
TEST(HierTest, PartsAreChosenByOptions) {
  for (const char* part : {"gloo", "shm"}) {
    RunBackendThreads(
        2,
        [&](BackendOptions options) -> absl::StatusOr<c10::intrusive_ptr<Backend>> {
          options.group.hostname = "127.0.0.1";
          options.group.implementations.Mutable<HierOptions>("hier").local = part;
          DDP_ASSIGN_OR_RETURN(const BackendEntry entry, BackendRegistry::Find("hier"));
          return entry.create(options);
        },
        [&](int, c10::intrusive_ptr<Backend>& backend) {
          EXPECT_EQ(backend->getBackendName(), part);
        });
  }
}

}  // namespace
}  // namespace ddp::backends::hier
