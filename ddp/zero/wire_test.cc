// Stage 2 with gradients in 16 bits: what stage 0 does with the hook of that name.

#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/hooks/compress.h"
#include "ddp/zero/zero_testing.h"

namespace ddp::zero {
namespace {

// See parity_test.cc.
std::vector<int> WorldSizes() {
  if (BackendUnderTest() == "gloo") return {2};
  if (BackendUnderTest() == "hier_in_turns") return {3, 4};
  return {2, 3, 4};
}

TEST(ZeroWireTest, StageTwoHasTheBitsOfTheHook) {
  for (const int world_size : WorldSizes()) {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      for (const double bucket_cap_mb : {25.0, 0.02}) {
        std::vector<at::Tensor> expected;
        RunRanks(world_size, [&](int rank, const GroupPtr& group) {
          Training run(group, Optimizers()[2].make, {.stage = 0});
          ASSERT_TRUE(run.model()
                          .register_comm_hook(std::make_unique<hooks::CompressHook>(group, dtype))
                          .ok());
          for (int step = 0; step < 10; ++step) run.Step(step, 0.05);
          if (rank == 0) expected = Values(*run.net);
        });
        RunRanks(world_size, [&](int rank, const GroupPtr& group) {
          Training run(group, Optimizers()[2].make,
                       {.stage = 2, .bucket_cap_mb = bucket_cap_mb, .gradient_dtype = dtype});
          for (int step = 0; step < 10; ++step) run.Step(step, 0.05);
          ExpectSameBits(Values(*run.net), expected,
                         absl::StrCat("rank ", rank, " of ", world_size, ", ", c10::toString(dtype),
                                      ", ", bucket_cap_mb));
        });
      }
    }
  }
}

// Each backward is rounded to 16 bits; their sum is in the parameters' dtype.
TEST(ZeroWireTest, AccumulationIsInFp32) {
  RunRanks(2, [](int, const GroupPtr& group) {
    at::Tensor parameter = at::ones({100}).requires_grad_();
    auto zero = *ZeroRedundancyOptimizer::Create(
        std::vector<at::Tensor>{parameter}, group,
        optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)),
        {.stage = 2, .gradient_dtype = at::kBFloat16});
    for (const double gradient : {1.0, 1.0 / 1024, 1.0 / 1024})
      (parameter * gradient).sum().backward();
    zero->step();
    EXPECT_EQ(parameter[7].item<float>(), -2.0f / 1024);
  });
}

TEST(ZeroWireTest, CountsWhatIsSent) {
  for (const std::optional<at::ScalarType> dtype :
       {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    RunRanks(2, [&](int, const GroupPtr& group) {
      // 2048 elements on 2 ranks: no padding.
      at::Tensor parameter = at::ones({2048}).requires_grad_();
      auto zero = *ZeroRedundancyOptimizer::Create(
          std::vector<at::Tensor>{parameter}, group,
          optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)),
          {.stage = 2, .bucket_cap_mb = 1e-3, .gradient_dtype = dtype});
      EXPECT_EQ(zero->comm_bytes().gradients, 0);
      for (int step = 1; step <= 3; ++step) {
        parameter.sum().backward();
        zero->step();
        EXPECT_EQ(zero->comm_bytes().gradients, step * 2048 * (dtype ? 2 : 4));
        EXPECT_EQ(zero->comm_bytes().parameters, step * 2048 / 2 * 4);
      }
    });
  }
}

TEST(ZeroWireTest, OtherDtypesAreRefused) {
  const auto made = ZeroRedundancyOptimizer::Create(
      std::vector<at::Tensor>{at::ones({5}).requires_grad_()}, nullptr,
      optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)),
      {.stage = 2, .gradient_dtype = at::kDouble});
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(made.status().message(), "Double is neither")) << made.status();
}

}  // namespace
}  // namespace ddp::zero
