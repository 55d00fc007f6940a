// Buffers are rank 0's if they are broadcast, else each rank's own.

#include <vector>

#include "ddp/nets_testing.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"

namespace ddp {
namespace {

// Buffers of several dtypes, some with gaps, empty or without dimensions; forward records what the
// ranks had when it ran.
struct Buffered : torch::nn::Module {
  explicit Buffered(int rank) {
    linear = register_module("linear", torch::nn::Linear(4, 2));
    register_buffer("float", at::full({3}, rank, at::kFloat));
    register_buffer("byte", at::full({1}, rank, at::kByte));
    register_buffer("half", at::full({5}, rank, at::kHalf));
    register_buffer("bool", at::full({2, 1}, rank == 0, at::kBool));
    register_buffer("long", at::full({}, rank, at::kLong));
    register_buffer("double_with_gaps", at::full({4, 4}, rank, at::kDouble).t().slice(1, 0, 4, 2));
    register_buffer("empty", at::empty({0, 7}, at::kInt));
    register_buffer("complex", at::full({2}, rank, at::kComplexFloat));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.clear();
    for (const at::Tensor& buffer : buffers()) seen.push_back(buffer.clone());
    return linear->forward(x);
  }
  torch::nn::Linear linear{nullptr};
  std::vector<at::Tensor> seen;
};

void ExpectOfRank(const std::vector<at::Tensor>& buffers, int rank) {
  const std::vector<at::Tensor> expected = Buffered(rank).buffers();
  ASSERT_EQ(buffers.size(), expected.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_TRUE(at::equal(buffers[i], expected[i])) << "buffer " << i << ": " << buffers[i];
  }
}

TEST(BufferTest, OfMixedDtypesAreRankZerosAtConstructionAndInEachForward) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Buffered>(rank);
    auto model = *Wrap(net, group);
    ExpectOfRank(net->buffers(), 0);
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> own = Buffered(rank).buffers();
      const std::vector<at::Tensor> buffers = net->buffers();
      for (size_t i = 0; i < own.size(); ++i) buffers[i].copy_(own[i]);
      model->forward(Input(rank, step)).sum().backward();
      ExpectOfRank(net->seen, 0);
    }
  });
}

TEST(BufferTest, StayEachRanksOwnWithoutBroadcast) {
  RunRanks(3, [](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Buffered>(rank);
    auto model = *Wrap(net, group, {.broadcast_buffers = false});
    ExpectOfRank(net->buffers(), rank);
    for (int step = 0; step < 3; ++step) {
      model->forward(Input(rank, step)).sum().backward();
      ExpectOfRank(net->seen, rank);
    }
    model->parallel().SyncBuffers();  // asked for
    ExpectOfRank(net->buffers(), 0);
  });
}

TEST(BufferTest, AreNotBroadcastWhileAccumulating) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Buffered>(rank);
    auto model = *Wrap(net, group);
    model->forward(Input(rank, 0)).sum().backward();
    auto guard = model->no_sync();
    // The first forward of the accumulation still belongs to the step before.
    model->forward(Input(rank, 1)).sum().backward();
    net->buffers()[0].fill_(rank + 5);
    model->forward(Input(rank, 2)).sum().backward();
    EXPECT_EQ(net->seen[0][0].item<float>(), rank + 5);
  });
}

// Forward reads rank 0's statistics and then updates them with its own batch.
TEST(BufferTest, RunningStatisticsDriftByOneForwardAtMost) {
  for (const bool broadcast : {true, false}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
      const auto mean = [&] { return net->named_buffers()["1.running_mean"].clone(); };
      auto model = *Wrap(net, group, {.broadcast_buffers = broadcast});
      for (int step = 0; step < 3; ++step) {
        std::vector<at::Tensor> before = {mean()};
        group->broadcast(before)->wait();  // what rank 0 has
        const at::Tensor started_from = broadcast ? before[0] : mean();
        const at::Tensor x = Input(rank, step);
        model->forward(x).sum().backward();
        at::Tensor expected =
            0.9 * started_from + 0.1 * net[0]->as<torch::nn::Linear>()->forward(x).detach().mean(0);
        EXPECT_TRUE(at::allclose(mean(), expected)) << "step " << step;
      }
    });
  }
}

}  // namespace
}  // namespace ddp
