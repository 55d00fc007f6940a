// What is planned is what is allocated, by category.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/counting_allocator_testing.h"
#include "ddp/zero/memory_plan.h"
#include "ddp/zero/zero_testing.h"
#include "torch/nn/modules/container/sequential.h"

namespace ddp::zero {
namespace {

constexpr int kRanks = 2;
constexpr double kBucketMb = 0.5;

std::shared_ptr<torch::nn::SequentialImpl> Layers() {
  torch::nn::Sequential net;
  for (const int64_t width : {500, 601, 300, 450}) net->push_back(torch::nn::Linear(width, width));
  return net.ptr();
}

// Ranks are threads: bytes of all of them together. Every call is made by all at once.
class Meter {
 public:
  explicit Meter(const GroupPtr& group) : group_(group) {}
  // The smallest of several readings: a thread of the backend may release the tensors of a
  // collective only after the collective has completed.
  int64_t Bytes() {
    group_->barrier()->wait();
    int64_t bytes = CountingAllocator::Install().bytes();
    for (int reading = 0; reading < 50; ++reading) {
      absl::SleepFor(absl::Milliseconds(10));
      bytes = std::min(bytes, CountingAllocator::Install().bytes());
    }
    group_->barrier()->wait();
    return bytes;
  }

 private:
  GroupPtr group_;
};

void ExpectNear(int64_t measured, int64_t planned, const std::string& what) {
  const double all = static_cast<double>(planned) * kRanks;
  EXPECT_NEAR(static_cast<double>(measured), all, 0.05 * all + 4096) << what;
}

TEST(ZeroMemoryTest, ThePlanIsWithinFivePercentOfTheAllocatorsBytes) {
  CountingAllocator::Install();
  for (const int stage : {0, 1, 2}) {
    RunRanks(kRanks, [&](int rank, const GroupPtr& group) {
      const std::string what = absl::StrCat("stage ", stage);
      Meter meter(group);
      const int64_t before = meter.Bytes();
      auto net = Layers();
      PlannedRange range = {.numels = {}, .element_bytes = 4, .state_bytes = 8};
      for (const at::Tensor& parameter : net->parameters()) {
        range.numels.push_back(parameter.numel());
      }
      const MemoryPlan plan =
          PlanMemory({range}, {.world_size = kRanks, .stage = stage, .bucket_cap_mb = kBucketMb});
      auto parallel = *DataParallel::Create(net, group,
                                            {.bucket_cap_mb = kBucketMb,
                                             .gradient_as_bucket_view = true,
                                             .reduce_gradients = stage < 2});
      const auto make = optim::FactoryOf<optim::FusedAdam>(torch::optim::AdamOptions(1e-3));
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      int64_t buckets = 0;
      ZeroRedundancyOptimizer* zero = nullptr;
      if (stage == 0) {
        optimizer = make({torch::optim::OptimizerParamGroup(net->parameters())});
      } else {
        auto made = *ZeroRedundancyOptimizer::Create(net->parameters(), group, make,
                                                     {.stage = stage, .bucket_cap_mb = kBucketMb});
        zero = made.get();
        optimizer = std::move(made);
      }
      const int64_t created = meter.Bytes();
      const auto backward = [&] {
        parallel->PreForward();
        at::Tensor loss = at::zeros({});
        for (const at::Tensor& parameter : net->parameters()) loss = loss + parameter.pow(2).sum();
        parallel->PostForward({});
        loss.backward();
      };
      backward();
      if (zero != nullptr) buckets = zero->peak_bucket_bytes();
      const int64_t reduced = meter.Bytes();
      optimizer->step();
      const int64_t stepped = meter.Bytes();
      parallel->zero_grad();
      backward();
      const int64_t again = meter.Bytes();
      if (rank != 0) return;
      EXPECT_EQ(buckets, plan.buckets) << what;
      // In stage 0 and 1 the reducer has its buckets, which the gradients are views of, from the
      // start; in stage 2 the shard is there from the start, too.
      ExpectNear(created - before, plan.parameters + plan.gradients, what + ": created");
      ExpectNear(reduced - created, plan.buckets, what + ": buckets");
      ExpectNear(stepped - reduced, plan.state, what + ": state");
      ExpectNear(again - before, plan.total(), what + ": total");
    });
  }
}

}  // namespace
}  // namespace ddp::zero
