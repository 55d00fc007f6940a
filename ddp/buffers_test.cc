// Buffers are rank 0's if they are broadcast, else each rank's own.

#include <vector>

#include "ATen/ops/batch_norm.h"
#include "absl/strings/match.h"
#include "base/status.h"
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

// Batch normalisation by a layer and by the function, a frozen layer, whose statistics backward
// needs, and a constant.
struct Normed : torch::nn::Module {
  // In double precision: a gradient is the small difference of large sums.
  Normed() {
    frozen->eval();
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = norm->forward(linear->forward(x.to(at::kDouble)));
    y = at::batch_norm(y.sin(), {}, {}, own_mean, own_variance, /*training=*/true, 0.1, 1e-5,
                       false);
    return frozen->forward(y.exp()) * mask;
  }
  // Behind a bias, batch normalisation would leave rounding errors of its gradient.
  torch::nn::Linear linear{
      register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false)))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(3))};
  torch::nn::BatchNorm1d frozen{register_module("frozen", torch::nn::BatchNorm1d(3))};
  at::Tensor own_mean{register_buffer("own_mean", at::zeros({3}))};
  at::Tensor own_variance{register_buffer("own_variance", at::ones({3}))};
  at::Tensor mask{register_buffer("mask", at::arange(3, at::kFloat))};
};

at::Tensor Varied(int rank, int forward) {
  return (at::arange(20, at::kFloat) * (1.3 + rank) + forward).sin().view({5, 4});
}

// As a discriminator's, of true examples and made ones. The broadcast before the second forward,
// and others, write what the first one has saved for backward, which does not need it.
TEST(BufferTest, MayBeBroadcastBetweenForwardAndBackward) {
  const std::vector<at::Tensor> expected = MeanGradients<Normed>(WorldSize(), [](Normed& net,
                                                                                 int from) {
    return net.forward(Varied(from, 0)).pow(2).sum() + net.forward(Varied(from, 1)).pow(2).sum();
  });
  for (const DataParallelOptions& options :
       {DataParallelOptions{}, {.gradient_as_bucket_view = true}, {.static_graph = true}}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(SeededNet<Normed>(), group, options);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor first = model->forward(Varied(rank, 0));
        const at::Tensor second = model->forward(Varied(rank, 1));
        {
          const at::NoGradGuard no_grad;
          model->forward(Varied(rank, 2));
        }
        model->parallel().SyncBuffers();
        (first.pow(2).sum() + second.pow(2).sum()).backward();
        ExpectClose(Gradients(*model->module()), expected);
      }
    });
  }
}

struct Scaled : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x) * scale; }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 3))};
  at::Tensor scale{register_buffer("scale", at::ones({3}))};
};

// Rank 0 changes it, as one process would: the others have the broadcast one, and the same error.
TEST(BufferTest, AChangeThatBackwardNeedsIsAnErrorOnEveryRank) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Scaled>(), group);
    model->forward(Varied(rank, 0)).sum().backward();
    const at::Tensor first = model->forward(Varied(rank, 0));
    if (rank == 0) model->module()->scale.fill_(2);
    const at::Tensor second = model->forward(Varied(rank, 1));
    EXPECT_TRUE(model->module()->scale.eq(2).all().item<bool>());
    const absl::Status status = CatchStatus("", [&] { (first.sum() + second.sum()).backward(); });
    EXPECT_TRUE(absl::StrContains(status.message(), "modified by an inplace operation")) << status;
  });
}

// Changed before the first forward on all ranks alike, as one that decays, it may be needed.
TEST(BufferTest, AChangeBeforeTheFirstOfTwoForwardsIsNone) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Scaled>(), group);
    for (int step = 1; step < 4; ++step) {
      model->zero_grad();
      model->module()->scale.fill_(step + rank);
      const at::Tensor sum =
          model->forward(Varied(rank, 0)).sum() + model->forward(Varied(rank, 1)).sum();
      sum.backward();
      EXPECT_TRUE(at::allclose(model->module()->linear->bias.grad(), at::full({3}, 10.0 * step)));
    }
  });
}

// With an expanded buffer, also of gaps, and an expanded, frozen parameter.
struct Expanded : torch::nn::Module {
  explicit Expanded(int rank, bool expand = true) {
    const at::Tensor one = at::full({1, 3}, rank, at::kFloat).expand({4, 3});
    mask = register_buffer("mask", expand ? one : one.clone());
    gaps = register_buffer("gaps", at::full({1, 6}, rank).slice(1, 0, 6, 2).expand({2, 3}));
    scale = register_parameter("scale", at::full({1}, rank, at::kFloat).expand({5}), false);
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 3))};
  at::Tensor mask, gaps, scale;
};

TEST(BufferTest, AnExpandedOneStaysExpanded) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Expanded>(rank + 7);
    auto model = Wrap(net, group);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(net->scale.eq(7).all().item<bool>());
    for (const int value : {7, 8}) {
      if (value == 8) {
        net->mask.narrow(0, 0, 1).fill_(8 + rank);
        net->gaps.narrow(0, 0, 1).fill_(8 + rank);
        (*model)->forward(Varied(rank, 0)).sum().backward();
      }
      EXPECT_TRUE(net->mask.eq(value).all().item<bool>()) << net->mask;
      EXPECT_TRUE(net->gaps.eq(value).all().item<bool>()) << net->gaps;
      EXPECT_EQ(net->mask.stride(0), 0);
    }
    const absl::Status status =
        Wrap(std::make_shared<Expanded>(rank, /*expand=*/rank == 0), group).status();
    EXPECT_TRUE(absl::StrContains(
        status.message(), "'mask: Float [4, 3] expanded in dimensions [0] (requires no gradient)'"))
        << status;
  });
}

struct Growing : torch::nn::Module {
  explicit Growing(int64_t size) : queue(register_buffer("queue", at::zeros({size}))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 3))};
  at::Tensor queue;
};

// Of one size in bytes, too.
TEST(BufferTest, OnesThatDifferAreNamedWithoutInitSync) {
  for (const bool same_bytes : {false, true}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto net = std::make_shared<Growing>(rank == 1 ? 4 : 2);
      if (rank == 1 && same_bytes) net->queue.set_data(at::zeros({1}, at::kDouble));
      auto model = *Wrap(net, group, {.init_sync = false});
      const absl::Status status = CatchStatus("", [&] { model->forward(Varied(rank, 0)); });
      EXPECT_TRUE(absl::StrContains(status.message(), "'queue: Float [2]")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    same_bytes ? "'queue: Double [1]" : "'queue: Float [4]"))
          << status;
    });
  }
}

struct MayHaveNone : torch::nn::Module {
  explicit MayHaveNone(bool has) {
    if (has) register_buffer("queue", at::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 3))};
};

TEST(BufferTest, ARankWithoutBuffersIsNamedWithoutInitSync) {
  for (const int without : {0, 1}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      const auto net = std::make_shared<MayHaveNone>(rank != without);
      auto model = *Wrap(net, group, {.init_sync = false});
      const absl::Status status = CatchStatus("", [&] { model->forward(Varied(rank, 0)); });
      EXPECT_TRUE(absl::StrContains(status.message(), "'queue: Float [2]")) << status;
    });
  }
}

TEST(BufferTest, OneMayGrowOnAllRanksAlike) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = std::make_shared<Growing>(2);
    auto model = *Wrap(net, group);
    for (int64_t size = 3; size < 6; ++size) {
      net->queue.set_data(at::full({size}, rank + size, at::kFloat));
      for (int i = 0; i < 2; ++i) {
        model->forward(Varied(rank, 0)).sum().backward();
        EXPECT_TRUE(at::equal(net->queue, at::full({size}, size, at::kFloat))) << net->queue;
      }
    }
    // On rank 1 only.
    if (rank == 1) net->queue.set_data(at::zeros({7}));
    const absl::Status status = CatchStatus("", [&] { model->forward(Varied(rank, 0)); });
    EXPECT_EQ(status.ok(), rank != 1) << status;
    if (rank != 1) return;
    EXPECT_TRUE(absl::StrContains(
        status.message(),
        "rank 1: the buffers differ from rank 0's, which are broadcast: 'queue' is Float [7] here, "
        "and was Float [5]"))
        << status;
  });
}

}  // namespace
}  // namespace ddp
