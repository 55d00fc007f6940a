// Embedding(sparse=true): gradients with only the used rows. Losses are scaled down, so that
// rounding stays below the tolerance where terms cancel.

#include <utility>
#include <vector>

#include "ddp/nets_testing.h"
#include "torch/nn/modules/embedding.h"
#include "torch/optim/sgd.h"

namespace ddp {
namespace {

// With `sparse` false the gradients are dense, and must be the same.
struct Words : torch::nn::Module {
  explicit Words(bool sparse) {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 3).sparse(sparse)));
    linear = register_module("linear", torch::nn::Linear(3, 2));
    bag = register_module(
        "bag", torch::nn::EmbeddingBag(
                   torch::nn::EmbeddingBagOptions(10, 2).mode(torch::kSum).sparse(sparse)));
  }
  static void Fill(at::Tensor& parameter) {
    parameter.copy_(at::arange(parameter.numel(), at::kFloat).mul(0.37).sin().view_as(parameter));
  }
  at::Tensor forward(const at::Tensor& ids, bool with_bag = true) {
    at::Tensor y = linear->forward(words->forward(ids).tanh());
    if (with_bag) y = y + bag->forward(ids.remainder(10).unsqueeze(0)).sum();
    return y;
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
};

std::shared_ptr<Words> MakeWords(bool sparse) {
  auto words = std::make_shared<Words>(sparse);
  at::NoGradGuard no_grad;
  for (at::Tensor& parameter : words->parameters()) Words::Fill(parameter);
  return words;
}

// Some of them twice, some on several ranks, of another number on each.
at::Tensor Ids(int rank, int step) {
  return at::arange(4 + rank, at::kLong).mul(3).add(step + rank).remainder(20).repeat({2});
}

std::vector<at::Tensor> DenseGradients(int world_size, int step, int accumulated = 1,
                                       bool with_bag = true) {
  auto net = MakeWords(/*sparse=*/false);
  for (int rank = 0; rank < world_size; ++rank) {
    for (int i = 0; i < accumulated; ++i) {
      (net->forward(Ids(rank, step + i), with_bag).pow(2).mul(0.01).sum() / world_size).backward();
    }
  }
  return Gradients(*net);
}

class SparseGradientTest : public testing::TestWithParam<DataParallelOptions> {};

TEST_P(SparseGradientTest, AreTheMeanOverRanks) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto wrapped = Wrap(net, group, GetParam());
    ASSERT_TRUE(wrapped.ok()) << wrapped.status();
    auto& model = **wrapped;
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      model.forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
      EXPECT_TRUE(net->words->weight.grad().is_sparse());
      ExpectClose(Gradients(*net), DenseGradients(3, step));
    }
  });
}

TEST_P(SparseGradientTest, AreAccumulated) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto model = *Wrap(net, group, GetParam());
    for (int step = 0; step < 3; ++step) {
      // To zero in place as well as to none.
      model->zero_grad(/*set_to_none=*/step == 1);
      {
        auto guard = model->no_sync();
        model->forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
      }
      model->forward(Ids(rank, step + 1)).pow(2).mul(0.01).sum().backward();
      ExpectClose(Gradients(*net), DenseGradients(WorldSize(), step, /*accumulated=*/2));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Options, SparseGradientTest,
                         testing::Values(DataParallelOptions{},
                                         DataParallelOptions{.find_unused_parameters = true},
                                         DataParallelOptions{.gradient_as_bucket_view = true},
                                         DataParallelOptions{.static_graph = true}));

// PyTorch's Reducer fails on undefined sparse gradients.
TEST(SparseTrainingTest, OfAParameterThatARankDoesNotUse) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    auto net = MakeWords(/*sparse=*/true);
    auto model = *Wrap(net, group, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const auto uses_bag = [&](int from) { return from == 0 && step % 2 == 1; };
      model->forward(Ids(rank, step), uses_bag(rank)).pow(2).mul(0.01).sum().backward();
      auto dense = MakeWords(/*sparse=*/false);
      for (int from = 0; from < WorldSize(); ++from) {
        (dense->forward(Ids(from, step), uses_bag(from)).pow(2).mul(0.01).sum() / WorldSize())
            .backward();
      }
      ExpectClose(Gradients(*net), Gradients(*dense));
    }
  });
}

// Gradients are reset between forward and backward, as in ddp.h's example.
TEST(SparseTrainingTest, OfAParameterThatARankDoesNotUseInAStaticGraph) {
  for (const bool one_uses_it : {true, false}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto net = MakeWords(/*sparse=*/true);
      auto model = *Wrap(net, group, {.bucket_cap_mb = 1e-4, .static_graph = true});
      const auto uses_bag = [&](int from) { return one_uses_it && from == 0; };
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss =
            model->forward(Ids(rank, step), uses_bag(rank)).pow(2).mul(0.01).sum();
        model->zero_grad();
        loss.backward();
        auto dense = MakeWords(/*sparse=*/false);
        for (int from = 0; from < WorldSize(); ++from) {
          (dense->forward(Ids(from, step), uses_bag(from)).pow(2).mul(0.01).sum() / WorldSize())
              .backward();
        }
        ExpectClose(Gradients(*net), Gradients(*dense));
        // Empty where no rank uses it.
        EXPECT_TRUE(net->bag->weight.grad().is_sparse());
      }
    });
  }
}

TEST(SparseTrainingTest, TrainsAsDenseOnesDo) {
  std::vector<at::Tensor> weights(2);
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    for (const bool sparse : {true, false}) {
      auto net = MakeWords(sparse);
      auto model = *Wrap(net, group);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 5; ++step) {
        model->zero_grad();
        model->forward(Ids(rank, step)).pow(2).mul(0.01).sum().backward();
        sgd.step();
      }
      if (rank == 0) weights[sparse] = net->words->weight.detach().clone();
    }
  });
  EXPECT_TRUE(at::allclose(weights[true], weights[false]));
}

}  // namespace
}  // namespace ddp
