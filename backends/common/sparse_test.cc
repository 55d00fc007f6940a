// All-reduce of sparse tensors, over the backend that DDP_TEST_BACKEND names.

#include "backends/common/sparse.h"

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "backends/conformance/rank_threads.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace ddp::backends {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

std::string BackendUnderTest() { return std::getenv("DDP_TEST_BACKEND"); }

void RunRanks(int world_size, const std::function<void(int rank, const GroupPtr& group)>& body) {
  RunRankThreads(world_size, BackendUnderTest(),
                 [&](const launchers::Rank& rank, const Group& group) {
                   body(rank.rank, group.process_group);
                 });
}

at::Tensor Sparse(const std::vector<int64_t>& rows, const at::Tensor& values, int64_t num_rows) {
  const at::Tensor indices = at::tensor(rows, at::kLong).unsqueeze(0);
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = num_rows;
  return at::sparse_coo_tensor(indices, values, sizes);
}

// Rank r has the rows r and 4, the latter twice; rank 1 has none.
at::Tensor OfRank(int rank, at::ScalarType dtype = at::kFloat) {
  if (rank == 1) return Sparse({}, at::empty({0, 3}, dtype), 6);
  at::Tensor values = at::arange(9, at::kFloat).view({3, 3}).add(10 * rank).to(dtype);
  return Sparse({4, rank, 4}, values, 6);
}

at::Tensor AllReduced(const GroupPtr& group, at::Tensor tensor,
                      c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors = {tensor};
  auto work = group->allreduce(tensors, options);
  work->wait();
  work->getFuture()->waitAndThrow();
  return tensor;
}

TEST(SparseAllReduceTest, SumsTheRowsOfAllRanks) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    at::Tensor expected = at::zeros({6, 3});
    for (int i = 0; i < 3; ++i) expected += OfRank(i).to_dense();
    const at::Tensor sum = AllReduced(group, OfRank(rank));
    EXPECT_TRUE(at::equal(sum.to_dense(), expected)) << sum;
    EXPECT_EQ(sum.coalesce()._nnz(), 3);  // of rows 0, 2 and 4
  });
}

TEST(SparseAllReduceTest, WhereNoRankHasAnElement) {
  RunRanks(2, [](int, const GroupPtr& group) {
    const at::Tensor sum = AllReduced(group, OfRank(1));
    EXPECT_EQ(sum._nnz(), 0);
    EXPECT_TRUE(at::equal(sum.to_dense(), at::zeros({6, 3})));
  });
}

TEST(SparseAllReduceTest, HasTheSameBitsOnAllRanks) {
  std::vector<at::Tensor> sums(3);
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < 200; ++i) rows.push_back((i * 7 + rank) % 50);
    at::Tensor values = at::arange(200 * 5, at::kFloat).view({200, 5}).mul(0.1).sin().add(rank);
    sums[rank] = AllReduced(group, Sparse(rows, values, 50)).to_dense();
  });
  EXPECT_TRUE(at::equal(sums[0], sums[1]));
  EXPECT_TRUE(at::equal(sums[0], sums[2]));
}

TEST(SparseAllReduceTest, AveragesOfFloatsAndIntegers) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    const at::Tensor mean = AllReduced(group, OfRank(rank), c10d::ReduceOp::AVG);
    const at::Tensor sum = OfRank(0).to_dense() + OfRank(2).to_dense();
    EXPECT_TRUE(at::equal(mean.to_dense(), sum / 3));
    const at::Tensor whole = AllReduced(group, OfRank(rank, at::kInt), c10d::ReduceOp::AVG);
    EXPECT_TRUE(at::equal(whole.to_dense(), (sum / 3).to(at::kInt)));
  });
}

// 2048 + 1 is 2048 in fp16, so adding 1 twice there would be lost.
TEST(SparseAllReduceTest, RoundsShortFloatsOnce) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    const at::Tensor values = at::full({1, 1}, rank == 0 ? 2048 : 1, at::kHalf);
    const at::Tensor sum = AllReduced(group, Sparse({0}, values, 1));
    EXPECT_EQ(sum.scalar_type(), at::kHalf);
    EXPECT_EQ(sum.to_dense().item<float>(), 2050);
  });
}

TEST(SparseAllReduceTest, WhatRanksDoNotAgreeOnIsAnErrorOnAll) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    // The shapes have the same number of elements, so that the watchdog sees no difference.
    const at::Tensor mine =
        rank != 1 ? Sparse({0}, at::ones({1, 4}), 3) : Sparse({0}, at::ones({1, 3}), 4);
    const absl::Status status = CatchStatus("", [&] { AllReduced(group, mine); });
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 0 has Float [3, 4]")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has Float [4, 3]")) << status;
    const absl::Status product =
        CatchStatus("", [&] { AllReduced(group, OfRank(0), c10d::ReduceOp::PRODUCT); });
    EXPECT_TRUE(absl::StrContains(product.message(), "must be SUM or AVG")) << product;
  });
}

}  // namespace
}  // namespace ddp::backends
