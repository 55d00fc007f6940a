#include "ddp/hooks/compress.h"

#include "ddp/hooks/hooks_testing.h"

namespace ddp::hooks {
namespace {

struct Case {
  const char* name;
  at::ScalarType dtype;
};
constexpr Case kCases[] = {{"fp16_compress", at::kHalf}, {"bf16_compress", at::kBFloat16}};

// Prime sizes, so that a 16-bit bucket ends within a word.
const Shapes kShapes = {{20, 31}, {7}, {5, 3, 3}, {1009}};
constexpr int64_t kElements = 620 + 7 + 45 + 1009;

// Of two ranks: PyTorch's bits, for any backend, since there is one order of addition, and halving
// is exact.
TEST(CompressTest, TwoRanksSumInSixteenBits) {
  for (const Case& one : kCases) {
    for (const bool views : {false, true}) {
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        GivenGradients run(kShapes, group, {.name = one.name},
                           {.bucket_cap_mb = 1e-3, .gradient_as_bucket_view = views});
        for (int step = 0; step < 4; ++step) {
          const std::vector<at::Tensor> first = RandomGradients(kShapes, 0, step);
          const std::vector<at::Tensor> second = RandomGradients(kShapes, 1, step);
          std::vector<at::Tensor> expected;
          for (size_t i = 0; i < first.size(); ++i) {
            const at::Tensor a = first[i].to(one.dtype).div_(2),
                             b = second[i].to(one.dtype).div_(2);
            expected.push_back((a + b).to(at::kFloat));
          }
          ExpectBits(run.Step(rank == 0 ? first : second), expected, one.name);
          EXPECT_EQ(run.bytes, 2 * kElements);
        }
      });
    }
  }
}

// bf16 has steps of 2^-7 above 1 and of 2^-6 above 3. A sum that is rounded after each addition
// never leaves 3; the mean of 3, 0.9 and 0.9 steps of 2^-7 is 0.6 of these above 1.
TEST(CompressTest, SumsAreInFp32WhereTheBackendCan) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << "shm averages; others sum what was divided";
  RunRanks(3, [](int rank, const GroupPtr& group) {
    GivenGradients run({{64}}, group, {.name = "bf16_compress"});
    const float step = 1.0f / 128;
    const std::vector<at::Tensor> means =
        run.Step({at::full({64}, rank == 0 ? 3.0f : 0.9f * step)});
    EXPECT_EQ(means[0][5].item<float>(), 1.0f + step);
    // A third of this is rounded so far up that three of them are more than it.
    const float same = 193 * step;
    EXPECT_EQ(run.Step({at::full({64}, same)})[0][5].item<float>(), same);
  });
}

// What the hook returns differs from the mean in fp32 by rounding to 16 bits.
void ExpectRounded(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& mean) {
  ASSERT_EQ(actual.size(), mean.size());
  for (size_t i = 0; i < mean.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], mean[i], 2e-2, 1e-2)) << "tensor " << i;
  }
}

TEST(CompressTest, AllRanksHaveTheSameBits) {
  const int ranks = BackendUnderTest() == "mpi" ? WorldSize() : 4;
  for (const Case& one : kCases) {
    RunRanks(ranks, [&](int rank, const GroupPtr& group) {
      GivenGradients run(kShapes, group, {.name = one.name}, {.bucket_cap_mb = 1e-3});
      for (int step = 0; step < 3; ++step) {
        const std::vector<at::Tensor> result = run.Step(RandomGradients(kShapes, rank, step));
        ExpectRounded(result, MeanOfRandom(kShapes, ranks, step));
        std::vector<at::Tensor> of_rank_0;
        for (const at::Tensor& tensor : result) {
          std::vector<at::Tensor> sent = {tensor.clone()};
          group->broadcast(sent)->wait();
          of_rank_0.push_back(sent[0]);
        }
        ExpectBits(result, of_rank_0, one.name);
      }
    });
  }
}

// Gradients of the hook's dtype go as they are; of a wider one, halved or quartered.
TEST(CompressTest, OtherDtypes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto net = std::make_shared<Given>(Shapes{{33, 5}});
      net->to(dtype);
      auto model = *Wrap(net, group);
      ASSERT_TRUE(Register({.name = "bf16_compress"}, group, model->parallel()).ok());
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor values = at::arange(165).view({33, 5}).remainder(7).to(dtype);
        model->forward(std::vector<at::Tensor>{values + rank}).backward();
        const at::Tensor gradient = net->parameters()[0].grad();
        EXPECT_EQ(gradient.scalar_type(), dtype);
        ExpectRounded({gradient.to(at::kDouble)},
                      {values.to(at::kDouble) + (WorldSize() - 1) / 2.0});
      }
      EXPECT_EQ(model->parallel().comm_bytes(), 3 * 2 * 33 * 5);
    });
  }
}

TEST(CompressTest, WithUnusedParameters) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.bucket_cap_mb = 1e-4, .find_unused_parameters = true});
    ASSERT_TRUE(Register({.name = "bf16_compress"}, group, model->parallel()).ok());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      // On rank 0 alone: the others have no gradient of their own to write to.
      model->forward(Input(rank, step), rank == 0).pow(2).sum().backward();
      const std::vector<at::Tensor> gradients = Gradients(*model->module());
      for (const at::Tensor& gradient : gradients) EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      ExpectRounded(gradients, MeanGradients<Net>(WorldSize(), [&](Net& net, int one) {
                      return net.forward(Input(one, step), one == 0).pow(2).sum();
                    }));
    }
    int64_t elements = 0;
    for (const at::Tensor& gradient : Gradients(*model->module())) elements += gradient.numel();
    EXPECT_EQ(model->parallel().comm_bytes(), 4 * 2 * elements);
  });
}

}  // namespace
}  // namespace ddp::hooks
