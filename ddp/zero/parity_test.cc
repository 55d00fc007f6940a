// Sharded training is unsharded training, bit for bit, whatever the stage and the partition.

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/hooks/compress.h"
#include "ddp/zero/zero_testing.h"

namespace ddp::zero {
namespace {

// Over gloo the order of a sum depends on the place in the buffer where there are more than two
// ranks. hier is hier proper where a host has two ranks.
std::vector<int> WorldSizes() {
  if (BackendUnderTest() == "gloo") return {2};
  if (BackendUnderTest() == "hier_in_turns") return {3, 4};
  return {2, 3, 4};
}

void ExpectStagesAgree(int world_size, const NamedOptimizer& optimizer, std::optional<double> clip,
                       const ZeroOptions& base, int steps) {
  std::vector<at::Tensor> expected;
  std::vector<double> norms;
  for (const int64_t stage : {0, 1, 2}) {
    ZeroOptions options = base;
    options.stage = stage;
    const std::string what = absl::StrCat(optimizer.name, ", ", world_size, " ranks, stage ", stage,
                                          ", ", options.partition);
    RunRanks(world_size, [&](int rank, const GroupPtr& group) {
      Training run(group, optimizer.make, options);
      for (int step = 0; step < steps; ++step) run.Step(step, clip);
      if (rank != world_size - 1) return;
      if (stage == 0) {
        expected = Values(*run.net);
        norms = run.norms;
      } else {
        ExpectSameBits(Values(*run.net), expected, what);
        EXPECT_EQ(run.norms, norms) << what;
      }
    });
  }
}

TEST(ZeroParityTest, ThirtyStepsOfEachOptimizerClipped) {
  for (const int world_size : WorldSizes()) {
    for (const NamedOptimizer& optimizer : Optimizers()) {
      // Small buckets, so that tensors are cut by bucket, too.
      ExpectStagesAgree(world_size, optimizer, /*clip=*/0.05, {.bucket_cap_mb = 0.02}, 30);
    }
  }
}

TEST(ZeroParityTest, WholeTensorsAndUnclipped) {
  const int world_size = WorldSizes().back();
  for (const char* partition : {"flat", "tensor"}) {
    for (const double bucket_cap_mb : {25.0, 0.001}) {
      ExpectStagesAgree(world_size, Optimizers()[3], std::nullopt,
                        {.partition = partition, .bucket_cap_mb = bucket_cap_mb}, 5);
    }
  }
}

TEST(ZeroParityTest, ParametersOfAllRanksAreEqualWithOverlappedGather) {
  std::vector<at::Tensor> expected;
  for (const bool overlap : {false, true}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      Training run(group, Optimizers()[2].make, {.stage = 1, .overlap_gather = overlap});
      // The wrapper's forward waits for the gather of the step before.
      for (int step = 0; step < 3; ++step) run.Step(step);
      run.zero->WaitForParameters();
      if (!overlap && Records(rank)) expected = Values(*run.net);
      if (overlap) ExpectSameBits(Values(*run.net), expected, absl::StrCat("rank ", rank));
    });
  }
}

TEST(ZeroParityTest, AccumulationSumsInAnotherOrder) {
  std::vector<at::Tensor> expected;
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[4].make, {.stage = 0});
    for (int step = 0; step < 5; ++step) run.Step(step, 1.0, /*parts=*/3);
    if (Records(rank)) expected = Values(*run.net);
  });
  // In stage 2 each of the three backwards is reduced; the wrapper's no_sync does not matter.
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[4].make, {.stage = 2, .bucket_cap_mb = 0.02});
    for (int step = 0; step < 5; ++step) run.Step(step, 1.0, /*parts=*/3);
    ExpectWithin(Values(*run.net), expected, 1e-6, absl::StrCat("rank ", rank));
  });
  // An explicit no_sync keeps whole gradients, which the last backward reduces: the same bits.
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[4].make, {.stage = 2, .bucket_cap_mb = 0.02});
    for (int step = 0; step < 5; ++step) {
      for (int part = 0; part < 3; ++part) {
        const int64_t begin = (rank * 3 + part) * 2;
        const at::Tensor loss = Loss(*run.net, Examples(step, begin, begin + 2)) / 3;
        if (part < 2) {
          const auto guard = run.zero->no_sync();
          loss.backward();
        } else {
          loss.backward();
        }
        EXPECT_EQ(run.net->out->weight.grad().defined(), part < 2);
      }
      run.zero->clip_grad_norm_(1.0);
      run.zero->step();
    }
    ExpectSameBits(Values(*run.net), expected, absl::StrCat("rank ", rank));
  });
}

TEST(ZeroParityTest, OneRankAndMoreRanksThanUnits) {
  auto net = SeededNet<MixedNet>(), same = SeededNet<MixedNet>();
  auto plain = Optimizers()[2].make(Groups(*same));
  auto zero =
      *ZeroRedundancyOptimizer::Create(Groups(*net), nullptr, Optimizers()[2].make, {.stage = 2});
  for (int step = 0; step < 3; ++step) {
    Loss(*net, Examples(step, 0, 12)).backward();
    Loss(*same, Examples(step, 0, 12)).backward();
    std::vector<at::Tensor> in_order;
    for (const auto& group : plain->param_groups()) {
      in_order.insert(in_order.end(), group.params().begin(), group.params().end());
    }
    EXPECT_EQ(zero->clip_grad_norm_(0.1), clip_grad_norm_(in_order, 0.1));
    plain->step();
    zero->step();
    plain->zero_grad();
    zero->zero_grad();
  }
  ExpectSameBits(Values(*net), Values(*same), "one rank");

  for (const int64_t stage : {1, 2}) {
    RunRanks(4, [&](int rank, const GroupPtr& group) {
      at::Tensor few = at::ones({20}).requires_grad_();
      auto optimizer = *ZeroRedundancyOptimizer::Create(
          std::vector<at::Tensor>{few}, group,
          optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(1)), {.stage = stage});
      (few * (stage == 1 ? 2.5 : rank + 1.0)).sum().backward();
      optimizer->step();
      EXPECT_TRUE(at::equal(few, at::full({20}, -1.5f))) << few;
    });
  }
}

// Stage 2 with gradients in 16 bits does what stage 0 does with the hook of that name.

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
          if (Records(rank)) expected = Values(*run.net);
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
