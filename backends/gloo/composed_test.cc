// Collectives of GlooBackend that ProcessGroupGloo's own do not serve.

#include <functional>
#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/match.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "backends/gloo/gloo_backend.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::gloo {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kRanks = 3;

// The ranks have no watchdog, because its Works hide those of the backend.
void RunRanks(const std::function<void(int rank, const BackendPtr& gloo)>& body) {
  RunBackendThreads(
      kRanks,
      [](const BackendOptions& options) { return BackendRegistry::Find("gloo")->create(options); },
      [&](int rank, const BackendPtr& gloo) { body(rank, gloo); });
}

// See gloo_backend.h: a longer name of a collective of ProcessGroupGloo corrupts the heap.
TEST(ComposedTest, NoCompletedCollectiveHasANameThatNeedsMemory) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    int own = 0;
    const auto check = [&](const WorkPtr& work) {
      const std::string name = c10d::opTypeToString(work->retrieveOpType());
      if (dynamic_cast<c10d::ProcessGroupGloo::AsyncWork*>(work.get()) != nullptr) {
        ++own;
        EXPECT_LE(name.size(), 15) << name;
      }
      work->wait();
    };
    const auto ones = [] { return at::ones({kRanks}); };
    Tensors one = {ones()}, two = {ones(), ones()};
    std::vector<Tensors> all = {{ones(), ones(), ones()}};
    std::vector<Tensors> lists = {{ones(), ones()}, {ones(), ones()}, {ones(), ones()}};
    Tensor whole = at::ones({kRanks * kRanks});
    Tensors wholes = {at::ones({kRanks * kRanks}), at::ones({kRanks * kRanks})};
    std::vector<Tensors> on_root, none;
    if (rank == 0) on_root = all;
    std::vector<int64_t> equal;

    check(gloo->broadcast(one));
    check(gloo->allreduce(one));
    check(gloo->allreduce_coalesced(two));
    check(gloo->reduce(one));
    check(gloo->allgather(all, one));
    check(gloo->all_gather_single(whole, one[0]));
    check(gloo->allgather_coalesced(lists, two));
    check(gloo->all_gather_single_coalesced(wholes, two));
    check(gloo->gather(on_root, one));
    check(gloo->scatter(one, on_root));
    check(gloo->reduce_scatter(one, all));
    check(gloo->reduce_scatter_single(one[0], whole));
    check(gloo->reduce_scatter_single_coalesced(two, wholes));
    check(gloo->all_to_all_single(one[0], two[0], equal, equal));
    check(gloo->alltoall(all[0], all[0]));
    check(gloo->barrier());
    const auto sparse = [&] {
      return at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::ones({1}), {4});
    };
    Tensors sparse_one = {sparse()};
    check(gloo->allreduce(sparse_one));
    check(gloo->allreduce_sparse(sparse_one));
    EXPECT_EQ(sparse_one[0].to_dense()[0].item<float>(), kRanks * kRanks);
    EXPECT_GE(own, 8) << "the test no longer sees ProcessGroupGloo's Works";
  });
}

TEST(ComposedTest, CoalescedTensorsDifferInSizeAndMayHaveGapsOrNoElement) {
  RunRanks([](int rank, const BackendPtr& gloo) {
    const auto of = [](int peer) {
      return Tensors{at::arange(6).view({2, 3}) + 10 * peer, at::empty({0}, at::kLong),
                     (at::arange(8) + 100 * peer).slice(0, 0, 8, 2)};
    };
    Tensors mine = of(rank);
    std::vector<Tensors> lists;
    for (int peer = 0; peer < kRanks; ++peer) {
      lists.push_back(
          {at::zeros({3, 2}, at::kLong).t(), at::empty({0}, at::kLong), at::zeros({4}, at::kLong)});
    }
    gloo->allgather_coalesced(lists, mine)->wait();
    Tensors into = {at::zeros({2 * kRanks, 3}, at::kLong), at::empty({0}, at::kLong),
                    at::zeros({8 * kRanks}, at::kLong).slice(0, 0, 8 * kRanks, 2)};
    const WorkPtr work = gloo->all_gather_single_coalesced(into, mine);
    work->wait();
    EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 3);
    for (int peer = 0; peer < kRanks; ++peer) {
      for (size_t i = 0; i < mine.size(); ++i) {
        const Tensor theirs = of(peer)[i];
        EXPECT_TRUE(at::equal(lists[peer][i], theirs)) << peer << lists[peer][i];
        const int64_t rows = theirs.size(0);
        EXPECT_TRUE(at::equal(into[i].narrow(0, peer * rows, rows), theirs)) << peer << into[i];
      }
    }
    gloo->allreduce_coalesced(mine)->wait();
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::equal(mine[i], of(0)[i] + of(1)[i] + of(2)[i])) << mine[i];
    }
  });
}

TEST(ComposedTest, CoalescedTensorsThatDoNotFitAreRefused) {
  RunRanks([](int, const BackendPtr& gloo) {
    const auto message = [](const std::function<void()>& call) {
      return std::string(CatchStatus("", call).message());
    };
    Tensors inputs = {at::ones({2})};
    std::vector<Tensors> shorter = {{at::ones({2})}, {at::ones({1})}, {at::ones({2})}};
    EXPECT_TRUE(absl::StrContains(message([&] { gloo->allgather_coalesced(shorter, inputs); }),
                                  "into Float [1] of rank 1"));
    std::vector<Tensors> fewer = {{at::ones({2})}, {}, {at::ones({2})}};
    EXPECT_TRUE(absl::StrContains(message([&] { gloo->allgather_coalesced(fewer, inputs); }),
                                  "into 0 of rank 1"));
    Tensors outputs = {at::ones({5})};
    EXPECT_TRUE(
        absl::StrContains(message([&] { gloo->all_gather_single_coalesced(outputs, inputs); }),
                          "does not make 5 x Float"));
    Tensors mixed = {at::ones({2}), at::ones({2}, at::kLong)};
    EXPECT_NE(message([&] { gloo->allreduce_coalesced(mixed); }), "");
    Tensors mixed_foreign = {at::ones({2}, at::kShort), at::ones({2})};
    EXPECT_TRUE(absl::StrContains(message([&] { gloo->allreduce_coalesced(mixed_foreign); }),
                                  "takes tensors of one dtype, not Short and Float"));
    Tensors none;
    EXPECT_NE(message([&] { gloo->allreduce_coalesced(none); }), "");
    EXPECT_NE(message([&] { gloo->all_gather_single_coalesced(none, inputs); }), "");
  });
}

}  // namespace
}  // namespace ddp::backends::gloo
