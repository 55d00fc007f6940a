// What ShmBackend has beyond the collectives, which //backends/conformance tests.

#include <functional>
#include <string>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/view_as_real.h"
#include "backends/backend.h"
#include "backends/conformance/rank_threads.h"
#include "backends/shm/options.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::shm {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
constexpr int kRanks = 3;

void RunRanks(const std::function<void(int rank, BackendPtr& backend)>& body,
              const ShmOptions& shm = {}) {
  RunBackendThreads(
      kRanks,
      [&shm](BackendOptions options) {
        options.group.implementations.Mutable<ShmOptions>("shm") = shm;
        return BackendRegistry::Find("shm")->create(options);
      },
      body);
}

bool SupportsAllocation(const BackendPtr& backend) {
  return backend->supportsTensorAlloc(c10::Device(c10::kCPU).index());
}

// Sums of rank + 1, in place.
void ExpectAllReduced(const BackendPtr& backend, int rank, at::Tensor tensor) {
  tensor.fill_(rank + 1);
  std::vector<at::Tensor> tensors = {tensor};
  backend->allreduce(tensors)->wait();
  EXPECT_TRUE(tensor.eq(6).all().item<bool>()) << tensor.numel();
}

TEST(ShmBackendTest, ItsTensorsAreOnesLikeAnyOther) {
  RunRanks([](int rank, BackendPtr& backend) {
    ASSERT_TRUE(SupportsAllocation(backend));
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      for (const int64_t count : {0, 1, 1000, 100'003}) {
        at::Tensor tensor = backend->allocateTensor(count, at::TensorOptions(dtype));
        EXPECT_EQ(tensor.scalar_type(), dtype);
        EXPECT_EQ(tensor.numel(), count);
        ExpectAllReduced(backend, rank, tensor);
      }
    }
  });
}

// Dtypes for which torch has too little arithmetic for the conformance suite.
TEST(ShmBackendTest, AddsUnsignedAndComplexNumbers) {
  RunRanks([](int rank, BackendPtr& backend) {
    for (const auto dtype :
         {at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kComplexDouble}) {
      for (const int64_t count : {1, 1001, 300'001}) {
        at::Tensor tensor = at::full({count}, rank + 1, at::kLong).to(dtype);
        std::vector<at::Tensor> tensors = {tensor};
        backend->allreduce(tensors)->wait();
        const auto real =
            c10::isComplexType(dtype) ? at::view_as_real(tensor).select(1, 0) : tensor;
        EXPECT_TRUE(real.to(at::kLong).eq(6).all().item<bool>()) << dtype << ", " << count;
      }
    }
  });
}

TEST(ShmBackendTest, ItsTensorsOutliveIt) {
  RunRanks([](int rank, BackendPtr& backend) {
    at::Tensor tensor = backend->allocateTensor(100'000, at::kFloat);
    ExpectAllReduced(backend, rank, tensor);
    backend.reset();
    tensor.fill_(7);
    EXPECT_EQ(tensor.sum().item<double>(), 700'000);
  });
}

TEST(ShmBackendTest, WhatDoesNotFitTheArenaIsInOrdinaryMemory) {
  RunRanks(
      [](int rank, BackendPtr& backend) {
        ASSERT_TRUE(SupportsAllocation(backend));
        at::Tensor small = backend->allocateTensor(1000, at::kFloat);
        at::Tensor large = backend->allocateTensor(1'000'000, at::kFloat);  // 4 MB
        ExpectAllReduced(backend, rank, small);
        ExpectAllReduced(backend, rank, large);
        // If one rank's tensor is in the arena and the others' are not, all ranks copy.
        ExpectAllReduced(backend, rank, rank == 1 ? small : at::full({1000}, 0.0f));
      },
      {.arena_mb = 1});
}

TEST(ShmBackendTest, WithoutAnArenaItAllocatesNothing) {
  RunRanks([](int, BackendPtr& backend) { EXPECT_FALSE(SupportsAllocation(backend)); },
           {.arena = false});
}

// The group of ranks 1 and 2 is rank 1's second and rank 2's first.
TEST(ShmBackendTest, SplitsAgainAndAgainIntoGroupsThatOverlap) {
  RunRanks([](int rank, BackendPtr& backend) {
    static const auto shared = c10::make_intrusive<c10d::HashStore>();
    for (int round = 0; round < 2; ++round) {
      for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, {1, 2}, {2, 0}}) {
        BackendPtr half = backend->split(shared, ranks, backend->getBackendOptions());
        const bool joins = rank == ranks[0] || rank == ranks[1];
        ASSERT_EQ(half != nullptr, joins);
        if (!joins) continue;
        std::vector<at::Tensor> tensors = {at::full({10}, rank + 1.0f)};
        half->allreduce(tensors)->wait();
        EXPECT_EQ(tensors[0][9].item<float>(), ranks[0] + ranks[1] + 2.0f);
      }
    }
  });
}

}  // namespace
}  // namespace ddp::backends::shm
